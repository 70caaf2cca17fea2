"""Rules of matrix products and attention."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules.elementwise import broadcast
from dynaxla.bucketing.values import Dim, Factor, Padded, Refusal, is_full, places, run_of, same_places

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


def product(call: Call) -> Padded:
    """mm, bmm, addmm, baddbmm, mv, dot: padding along the contracted dim is zero in both, as zero times junk may be NaN."""
    names = [name for name, value in call.given.items() if isinstance(value, Padded)]
    left_name, right_name = names[-2:]
    left, right = call[left_name], call[right_name]
    inner, outer = len(left.dims) - 1, max(len(right.dims) - 2, 0)
    _same_dim(left.dims[inner], right.dims[outer])
    changed = {left_name: call.build.mask(left, [inner], 0), right_name: call.build.mask(right, [outer], 0)}
    dims = (*left.dims[:inner], *right.dims[outer + 1 :])
    if inner == 2:
        dims = (broadcast([left.dims[:1], right.dims[:1]])[0], *dims[1:])
    if len(names) == 3:
        broadcast([call[names[0]].dims, dims])
    return call.result(call.same(**changed), dims)


def linear(call: Call) -> Padded:
    """A product with a weight as it lies in memory: rows of the weight are the result's columns."""
    names = list(call.given)
    x, weight = call[names[0]], call[names[1]]
    _same_dim(x.dims[-1], weight.dims[-1])
    changed = {names[0]: call.build.mask(x, [len(x.dims) - 1], 0), names[1]: call.build.mask(weight, [1], 0)}
    return call.result(call.same(**changed), (*x.dims[:-1], weight.dims[0]))


def attention(call: Call) -> Any:
    """Padded keys get no weight: the mask says so, or causality does; padded values are zero, as zero times NaN is NaN."""
    query, key, value = call["query"], call["key"], call["value"]
    build, rank = call.build, len(query.dims)
    length = key.dims[rank - 2]
    changed: dict[str, Any] = {"value": build.mask(value, [rank - 2], 0)}
    causal = bool(call.get("is_causal", False))
    _same_dim(length, value.dims[rank - 2])
    _require_fixed_heads(call, query, key)
    if causal and not same_places(query.dims[rank - 2], length):
        raise Refusal("causal attention of queries and keys of different lengths")
    if not is_full(length):
        changed["key"] = build.mask(key, [rank - 2], 0)
        run_of(length)
    if not is_full(length) and not causal:
        changed[_mask_name(call)] = _key_mask(call, query, length)
    dims = (*broadcast([query.dims[:-2], key.dims[:-2]]), query.dims[rank - 2], value.dims[rank - 1])
    if (given := call.get(_mask_name(call))) is not None:
        broadcast([given.dims, (*dims[:-1], length)])
    node = call.same(**changed)
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, dims)
    output = call.result(build.emit(operator.getitem, node, 0), dims)
    # The other results serve the backward pass; their layout is the kernel's own.
    return (output, *[None] * (len(node.meta["val"]) - 1))


def _require_fixed_heads(call: Call, query: Padded, key: Padded) -> None:
    """Raises Refusal where the head size, which scales the scores, varies, or where weights are dropped at random."""
    if not is_full(query.dims[-1]) or not is_full(key.dims[-1]):
        raise Refusal("the size of the heads varies")
    if call.get("dropout_p", 0.0):
        raise Refusal("it drops weights at random")


def _mask_name(call: Call) -> str:
    return "mask" if "mask" in call.given else "attn_mask"


def _key_mask(call: Call, query: Padded, length: Dim) -> Padded:
    """The call's mask, or none, with the padded keys left out."""
    given = call.get(_mask_name(call))
    if given is not None:
        if given.dims[-1] == _ONE:
            raise Refusal("a mask that is one for all keys")
        return call.build.mask(given, [len(given.dims) - 1], False if given.meta.dtype is torch.bool else -math.inf)
    dtype = query.meta.dtype
    zeros = call.build.emit(aten.full.default, [1, places(length)], 0, dtype=dtype, device=call.build.device)
    masked = call.build.mask(Padded(zeros, (_ONE, length)), [1], -math.inf)
    node = call.build.emit(aten.expand.default, masked.node, [places(query.dims[-2]), places(length)])
    return Padded(node, (query.dims[-2], length))


def _same_dim(left: Dim, right: Dim) -> None:
    if not same_places(left, right):
        raise Refusal("the contracted dims hold their real elements in different places")


def distances(call: Call) -> Padded:
    """cdist: between rows; what both rows have in their padding is zero."""
    left, right = call["x1"], call["x2"]
    _same_dim(left.dims[-1], right.dims[-1])
    batch = broadcast([left.dims[:-2], right.dims[:-2]]) if len(left.dims) > 2 else ()
    node = call.same(x1=call.build.mask(left, [-1], 0), x2=call.build.mask(right, [-1], 0))
    return call.result(node, (*batch, left.dims[-2], right.dims[-2]))
