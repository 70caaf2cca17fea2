"""Rules of attention, forward and backward."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, takes
from dynaxla.bucketing.pad_rules.alignment import align_to, align_values, most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    PaddedValue,
    Results,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.custom_ops import internal

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
_WITH_LOGSUMEXP = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default, internal.ATTENTION})


@takes(dropout_p=CONSTANT, scale=CONSTANT)
def attention(call: RuleContext) -> Results:
    """Padded keys get no weight, by a mask or by causality; padded values are zero, as zero times NaN is NaN."""
    call = _align(call)
    query, value = call["query"], call["value"]
    build, rank = call.build, len(query.dims)
    changed = {"value": build.mask(value, [rank - 2], 0), **_mask_padded_keys(call)}
    rows = (*_batch(query, call["key"]), query.dims[rank - 2])
    node = call.same(**changed)
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, (*rows, value.dims[rank - 1]))
    output = call.result(build.emit(operator.getitem, node, 0), (*rows, value.dims[rank - 1]))
    if call.node.target not in _WITH_LOGSUMEXP:
        return (output, *[None] * (len(node.meta["val"]) - 1))  # their layout depends on the kernel
    return output, call.result(build.emit(operator.getitem, node, 1), rows)


@takes(dropout_p=CONSTANT, scale=CONSTANT)
def attention_backward(call: RuleContext) -> Results:
    """Padded keys get no weight, and neither do padded queries, so that keys and values get no gradient from them."""
    call = _align(call)
    query, key, value = call["query"], call["key"], call["value"]
    build, rank = call.build, len(query.dims)
    row = rank - 2
    grad = "grad" if "grad" in call.given else "grad_out"
    rows = (*_batch(query, key), query.dims[row])
    given, out = (align_to(call, call[name], (*rows, value.dims[-1])) for name in (grad, "out"))
    logsumexp = align_to(call, call["logsumexp"], rows)
    changed = {
        "value": build.mask(value, [row], 0),
        "query": build.mask(query, [row], 0),
        "logsumexp": build.mask(logsumexp, [row], math.inf),  # weights are exp(score - logsumexp)
        grad: build.mask(given, [row], 0),
        "out": build.mask(out, [row], 0),
        **_mask_padded_keys(call),
    }
    mask = changed.get(_mask_name(call), call[_mask_name(call)])
    if mask is not None and mask.meta.dtype is not torch.bool:
        changed[_mask_name(call)] = build.mask(mask, [len(mask.dims) - 2], 0)
    return call.results(call.same(**changed), [query.dims, key.dims, value.dims])


def _align(call: RuleContext) -> RuleContext:
    """The call with the real elements of its operands in equal places: in batches, and in the rows of keys and values."""
    names = ("query", "key", "value")
    query, key, value = align_values(call, [call[name] for name in names], behind=2)
    row = len(key.dims) - 2
    length = most_factored_dim([key.dims[row], value.dims[row]])
    key, value = (move_elements(call, each, row, length) for each in (key, value))
    return replace(call, given={**call.given, **dict(zip(names, (query, key, value), strict=True))})


def _mask_padded_keys(call: RuleContext) -> dict[str, PaddedValue | bool | None]:
    """The arguments of a call in which no query attends to a padded key."""
    query, key = call["query"], call["key"]
    row = len(query.dims) - 2
    length = key.dims[row]
    causal = bool(call.get("is_causal", False))
    _require_fixed_heads(call, query, key)
    given = _align_mask(call, query.dims[row], length)
    alike = have_same_layout(query.dims[row], length)
    if causal and (not alike or given is None):
        single_factor(query.dims[row])  # a query attends to keys up to its own position
        single_factor(length)
    if given is not None:
        given = align_to(call, given, (*_batch(query, key), query.dims[row], length))
    if is_full(length):
        return {_mask_name(call): given}
    changed: dict[str, PaddedValue | bool | None] = {"key": call.build.mask(key, [row], 0)}
    if causal and given is None:
        if alike:
            return changed  # padded keys come after every query
        changed["is_causal"] = False
        given = _causal_mask(call, query, length)
    return {**changed, _mask_name(call): _key_mask(call, given, query, length)}


def _require_fixed_heads(call: RuleContext, query: PaddedValue, key: PaddedValue) -> None:
    """Raises Unpaddable if the head size varies, as it scales the scores, or if the call has dropout."""
    if not is_full(query.dims[-1]) or not is_full(key.dims[-1]):
        raise Unpaddable("the size of the heads varies")
    if call.get("dropout_p", 0.0):
        raise Unpaddable("it has dropout")


def _mask_name(call: RuleContext) -> str:
    return "mask" if "mask" in call.given else "attn_mask"


def _align_mask(call: RuleContext, queries: Dim, keys: Dim) -> PaddedValue | None:
    """The call's mask, aligned with the positions of these queries and keys."""
    given: PaddedValue | None = call.get(_mask_name(call))
    if given is None:
        return None
    last = len(given.dims) - 1
    for place, dim in ((last - 1, queries), (last, keys)):
        if given.dims[place] != _ONE:
            given = move_elements(call, given, place, dim)
    return given


def _key_mask(call: RuleContext, given: PaddedValue | None, query: PaddedValue, length: Dim) -> PaddedValue:
    """The call's mask (or a new one) with padded keys masked out."""
    if given is not None:
        if given.dims[-1] == _ONE:
            raise Unpaddable("a mask that is broadcast over the keys")
        return call.build.mask(given, [len(given.dims) - 1], False if given.meta.dtype is torch.bool else -math.inf)
    dtype = query.meta.dtype
    zeros = call.build.emit(aten.full.default, [1, padded_size(length)], 0, dtype=dtype, device=call.build.device)
    masked = call.build.mask(PaddedValue(zeros, (_ONE, length)), [1], -math.inf)
    node = call.build.emit(aten.expand.default, masked.node, [padded_size(query.dims[-2]), padded_size(length)])
    return PaddedValue(node, (query.dims[-2], length))


def _causal_mask(call: RuleContext, query: PaddedValue, length: Dim) -> PaddedValue:
    """The causal mask as a tensor, as some kernels take no mask beside `is_causal`. Positions count from the front."""
    build, rows = call.build, query.dims[-2]
    counted = [
        build.emit(aten.arange.default, padded_size(dim), dtype=torch.int64, device=build.device)
        for dim in (rows, length)
    ]
    seen = build.emit(aten.le.Tensor, counted[1], build.emit(aten.unsqueeze.default, counted[0], 1))
    numbers = [
        build.emit(aten.full.default, [], n, dtype=query.meta.dtype, device=build.device) for n in (0, -math.inf)
    ]
    return PaddedValue(build.emit(aten.where.self, seen, *numbers), (rows, length))


def _batch(query: PaddedValue, key: PaddedValue) -> tuple[Dim, ...]:
    """Indices of the batch dims (all before the rows); several query heads may share a key head."""
    mine, theirs = query.dims[:-2], key.dims[:-2]
    if (
        mine
        and theirs
        and is_full(mine[-1])
        and is_full(theirs[-1])
        and padded_size(mine[-1]) > padded_size(theirs[-1])
    ):
        return (*broadcast([mine[:-1], theirs[:-1]]), mine[-1]) if len(mine) > 1 else mine
    return broadcast([mine, theirs])
