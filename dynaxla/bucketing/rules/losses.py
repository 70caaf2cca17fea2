"""Rules of losses: sums and means over real elements."""

from __future__ import annotations

from typing import Any

import torch

from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules.elementwise import broadcast
from dynaxla.bucketing.rules.reductions import mean_of
from dynaxla.bucketing.values import Padded, Refusal, run_of, same_places

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers of the reductions


def loss(call: Call) -> Padded:
    """Losses of pairs of elements."""
    dims = broadcast([value.dims for value in call.tensors])
    each = call.result(call.same(reduction=_NONE), dims)
    if call["reduction"] == _NONE:
        return each
    every = list(range(len(dims)))
    if call["reduction"] == _MEAN:
        return call.result(mean_of(call, each, every, False, each.meta.dtype), ())
    return call.result(call.build.emit(aten.sum.default, call.build.mask(each, every, 0).node), ())


def nll_loss(call: Call) -> Any:
    """Padding has the label that is to be ignored, and its scores are zero, as zero times junk may be NaN."""
    scores, labels = call["self"], call["target"]
    rank = len(scores.dims)
    others = [d for d in range(rank) if d != min(rank - 1, 1)] if rank > 1 else []
    if any(not same_places(scores.dims[d], dim) for d, dim in zip(others, labels.dims, strict=True)):
        raise Refusal("scores and labels hold their real elements in different places")
    run_of(scores.dims[min(rank - 1, 1)])
    known = call.build.mask(labels, range(len(labels.dims)), call["ignore_index"])
    node = call.same(self=call.build.mask(scores, range(rank), 0), target=known)
    return call.results(node, [labels.dims if call["reduction"] == _NONE else (), ()])
