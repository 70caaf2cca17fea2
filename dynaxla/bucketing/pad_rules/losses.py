"""Rules of losses: sums and means over real elements."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import align_operands, most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.reductions import masked_mean
from dynaxla.bucketing.padded_value import PaddedValue, Results, single_factor
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers of the reductions


@takes(reduction=LAYOUT, beta=CONSTANT, delta=CONSTANT)
def loss(call: RuleContext) -> PaddedValue:
    """Sums and means exclude padding; unreduced losses are elementwise."""
    call = align_operands(call)
    dims = broadcast([value.dims for value in call.tensors])
    each = call.result(call.same(reduction=_NONE), dims)
    if call["reduction"] == _NONE:
        return each
    every = list(range(len(dims)))
    if call["reduction"] == _MEAN:
        return call.result(masked_mean(call, each, every, False, each.meta.dtype), ())
    return call.result(call.build.emit(aten.sum.default, call.build.mask(each, every, 0).node), ())


@takes(reduction=LAYOUT, ignore_index=CONSTANT)
def nll_loss(call: RuleContext) -> Results:
    """Padded rows get the label `ignore_index` and zero scores, as zero times NaN is NaN."""
    scores, labels = call["self"], call["target"]
    rank = len(scores.dims)
    others = [d for d in range(rank) if d != min(rank - 1, 1)] if rank > 1 else []
    for i, d in enumerate(others):
        dim = most_factored_dim([scores.dims[d], labels.dims[i]])
        scores, labels = move_elements(call, scores, d, dim), move_elements(call, labels, i, dim)
    single_factor(scores.dims[min(rank - 1, 1)])
    known = call.build.mask(labels, range(len(labels.dims)), call["ignore_index"])
    node = call.same(self=call.build.mask(scores, range(rank), 0), target=known)
    return call.results(node, [labels.dims if call["reduction"] == _NONE else (), ()])
