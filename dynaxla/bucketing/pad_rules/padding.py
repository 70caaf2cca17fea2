"""Rules of ops that add elements at the true ends of dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.padded_value import Dim, Number, PaddedValue, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed, is_varying

aten = torch.ops.aten


@takes(pad=TRUE_SIZE, value=TRUE_SIZE)
def pad(call: RuleContext) -> PaddedValue:
    """constant_pad_nd: padding after a dim's true end is set to the op's value."""
    value: PaddedValue = call.tensors[0]
    amounts, rank = list(call["pad"]), len(value.dims)
    changed = [d for d in range(rank) if any(amount != 0 for amount in padding_of_dim(amounts, rank, d))]
    varying = [d for d in changed if not is_full(value.dims[d])]
    for d in varying:
        value = move_to_front(call, value, d)
    sizes = call.true_sizes
    dims = tuple((call.build.factor(sizes[i]),) if i in changed else d for i, d in enumerate(value.dims))
    if not is_varying(call["value"]) and all(is_fixed(amount) and amount >= 0 for amount in amounts):
        number = _number(call["value"], value.meta.dtype)
        return call.result(call.same(self=call.build.mask(value, varying, number)), dims)
    filler = _fill_value(call, value.meta.dtype)
    for d in changed:
        value = _pad_with(call, value, d, padding_of_dim(amounts, rank, d)[0], dims[d], filler)
    return call.result(value.node, dims)


def padding_of_dim(amounts: Sequence[Size], rank: int, place: int) -> tuple[Size, Size]:
    """The number of elements added before and after a dim; torch lists the last dim first."""
    first = 2 * (rank - 1 - place)
    return (amounts[first], amounts[first + 1]) if first < len(amounts) else (0, 0)


def _pad_with(call: RuleContext, value: PaddedValue, place: int, front: Size, dim: Dim, filler: Node) -> PaddedValue:
    """Every element of the result reads the input or, outside of it, the fill value, a 0-d tensor."""
    build, old = call.build, value.dims[place]
    source = build.emit(aten.sub.Tensor, iota(call, padded_size(dim)), build.scalar(front))
    below = build.emit(aten.lt.Tensor, source, build.scalar(single_factor(old).size))
    inside = build.emit(aten.logical_and.default, below, build.emit(aten.ge.Scalar, source, 0))
    shape = [*value.meta.shape]
    if shape[place] == 0:
        shape[place] = padded_size(dim)
        node = build.emit(aten.expand.default, filler, shape)
        return PaddedValue(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))
    read = _gather_clamped(call, value, place, source)
    node = build.emit(aten.where.self, broadcast_along(call, inside, len(value.dims), place), read, filler)
    return PaddedValue(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def _fill_value(call: RuleContext, dtype: torch.dtype) -> Node:
    """The fill value, a 0-d tensor."""
    if is_varying(call["value"]):
        return call.build.emit(aten._to_copy.default, call.build.scalar(call["value"]), dtype=dtype)
    number = _number(call["value"], dtype)
    return call.build.emit(aten.full.default, [], number, dtype=dtype, device=call.build.device)


@takes(padding=TRUE_SIZE)
def edge_pad(call: RuleContext) -> PaddedValue:
    """reflection_pad, replication_pad: the true edges are repeated."""
    value: PaddedValue = call["self"]
    amounts, rank, sizes = list(call["padding"]), len(value.dims), call.true_sizes
    mirrored = "reflection" in call.op_name
    image = range(rank - len(amounts) // 2, rank)
    if all(is_full(value.dims[d]) for d in image) and all(map(is_fixed, amounts)):
        dims = (*value.dims[: image[0]], *((call.build.factor(sizes[d]),) for d in image))
        return call.result(call.same(), dims)
    for d in image:
        value = move_to_front(call, value, d)
        value = _repeated(call, value, d, padding_of_dim(amounts, rank, d)[0], (call.build.factor(sizes[d]),), mirrored)
    return call.result(value.node, value.dims)


def _repeated(call: RuleContext, value: PaddedValue, place: int, front: Size, dim: Dim, mirrored: bool) -> PaddedValue:
    source = edge_positions(call, padded_size(dim), front, value.dims[place], mirrored)
    return PaddedValue(
        _gather_clamped(call, value, place, source), (*value.dims[:place], dim, *value.dims[place + 1 :])
    )


def edge_positions(call: RuleContext, count: int, front: Size, dim: Dim, mirrored: bool) -> Node:
    """The position of `dim` that each of `count` elements repeats; negative positions read the first element."""
    build = call.build
    source = build.emit(aten.sub.Tensor, iota(call, count), build.scalar(front))
    end = build.scalar(single_factor(dim).size - 1)
    if not mirrored:
        return build.emit(aten.minimum.default, source, end)
    source = build.emit(aten.abs.default, source)
    beyond = build.emit(aten.abs.default, build.emit(aten.sub.Tensor, end, source))
    return build.emit(aten.sub.Tensor, end, beyond)


def _gather_clamped(call: RuleContext, value: PaddedValue, place: int, source: Node) -> Node:
    """The elements at these positions; positions out of range are clamped to the dim's ends."""
    clamped = call.build.emit(aten.clamp.default, source, 0, padded_size(value.dims[place]) - 1)
    return call.build.emit(aten.index_select.default, value.node, place, clamped)


def _number(value: float, dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    return float(value) if dtype.is_floating_point else int(value)
