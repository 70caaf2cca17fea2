"""Rules of losses: sums and means over real elements."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import aligned, finest, relaid
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.reductions import mean_of
from dynaxla.bucketing.padded_value import Padded, Results, run_of
from dynaxla.bucketing.rule_context import Call

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers of the reductions


@takes(reduction=LAYOUT, beta=CONSTANT, delta=CONSTANT)
def loss(call: Call) -> Padded:
    """Sums and means exclude padding; unreduced losses are elementwise."""
    call = aligned(call)
    dims = broadcast([value.dims for value in call.tensors])
    each = call.result(call.same(reduction=_NONE), dims)
    if call["reduction"] == _NONE:
        return each
    every = list(range(len(dims)))
    if call["reduction"] == _MEAN:
        return call.result(mean_of(call, each, every, False, each.meta.dtype), ())
    return call.result(call.build.emit(aten.sum.default, call.build.mask(each, every, 0).node), ())


@takes(reduction=LAYOUT, ignore_index=CONSTANT)
def nll_loss(call: Call) -> Results:
    """Padded rows get the label `ignore_index` and zero scores, as zero times NaN is NaN."""
    scores, labels = call["self"], call["target"]
    rank = len(scores.dims)
    others = [d for d in range(rank) if d != min(rank - 1, 1)] if rank > 1 else []
    for i, d in enumerate(others):
        dim = finest([scores.dims[d], labels.dims[i]])
        scores, labels = relaid(call, scores, d, dim), relaid(call, labels, i, dim)
    run_of(scores.dims[min(rank - 1, 1)])
    known = call.build.mask(labels, range(len(labels.dims)), call["ignore_index"])
    node = call.same(self=call.build.mask(scores, range(rank), 0), target=known)
    return call.results(node, [labels.dims if call["reduction"] == _NONE else (), ()])
