"""Rules of ops that split, stack, repeat and roll tensors."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import align_values, move_elements
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.views import merge_full_factors, slice_at
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten


@takes(dim=LAYOUT, split_sizes=TRUE_SIZE, split_size=TRUE_SIZE)
def split(call: RuleContext) -> tuple[PaddedValue, ...]:
    """Each piece begins at the true end of the one before it."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    start: Size = 0
    results = []
    for wanted in call.node.meta["val"]:
        size = call.build.known_sizes(wanted)[place]
        factor = call.build.factor(size)
        dims = (*value.dims[:place], (factor,), *value.dims[place + 1 :])
        results.append(call.result(slice_at(call, value, place, factor, start), dims))
        start = start + size
    return tuple(results)


@takes(dim=LAYOUT)
def unbind(call: RuleContext) -> tuple[PaddedValue, ...]:
    """The unbound dim must have no padding; in other dims padding stays padding."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    if not is_full(value.dims[place]):
        raise Unpaddable("the unbound dim varies")
    dims = (*value.dims[:place], *value.dims[place + 1 :])
    return call.results(call.same(), [dims] * padded_size(value.dims[place]))


@takes(dim=LAYOUT)
def glu(call: RuleContext) -> PaddedValue:
    """The halved dim must have no padding; in other dims padding stays padding."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    if not is_full(value.dims[place]):
        raise Unpaddable("the dim that is halved varies")
    half = padded_size(value.dims[place]) // 2
    return call.result(call.same(), (*value.dims[:place], (Factor(half, half),), *value.dims[place + 1 :]))


@takes(dim=LAYOUT)
def stack(call: RuleContext) -> PaddedValue:
    """The new dim has no padding; in the others padding stays padding."""
    values = align_values(call, call["tensors"])
    dims = broadcast([value.dims for value in values])
    place = call["dim"] % (len(dims) + 1)
    count = len(values)
    return call.result(call.same(tensors=values), (*dims[:place], (Factor(count, count),), *dims[place:]))


@takes(repeats=BUCKET_SIZE)
def repeat(call: RuleContext) -> PaddedValue:
    """Copies follow each other with their padding, as a dim of several runs."""
    value: PaddedValue = call.tensors[0]
    if any(is_fixed(count) and count < 1 for count in call["repeats"]):
        raise Unpaddable("it repeats zero times")
    new = len(call["repeats"]) - len(value.dims)
    old: tuple[Dim, ...] = (*[()] * new, *value.dims)
    counts = [call.build.factor(count) for count in call["repeats"]]
    dims = tuple(
        merge_full_factors([f for f in (count, *dim) if f.size != 1]) for count, dim in zip(counts, old, strict=True)
    )
    node = call.build.emit(aten.repeat.default, value.node, [count.padded for count in counts])
    # Padded copies repeat real elements, so the padding has no single fill value.
    return call.result(node, dims, value.fill if all(count.is_full for count in counts) else None)


@takes(shifts=TRUE_SIZE, dims=LAYOUT)
def roll(call: RuleContext) -> PaddedValue:
    """Positions are taken modulo the true size."""
    value: PaddedValue = call.tensors[0]
    if not call["dims"]:
        return _roll_flat(call, value)
    for shift, place in zip(call["shifts"], [d % len(value.dims) for d in call["dims"]], strict=True):
        value = move_to_front(call, value, place)
        value = PaddedValue(_rolled(call, value.node, value.dims[place], place, shift), value.dims)
    return call.result(value.node, value.dims)


def _roll_flat(call: RuleContext, value: PaddedValue) -> PaddedValue:
    """roll without dims: rolls the flattened value."""
    row = flatten(call, value)
    rolled = PaddedValue(_rolled(call, row.node, row.dims[0], 0, call["shifts"][0]), row.dims)
    back = move_elements(call, rolled, 0, tuple(factor for dim in value.dims for factor in dim))
    return call.result(call.build.emit(aten.view.default, back.node, list(value.meta.shape)), value.dims)


def _rolled(call: RuleContext, node: Node, dim: Dim, place: int, shift: Size) -> Node:
    build = call.build
    if is_full(dim) and is_fixed(shift):
        return build.emit(aten.roll.default, node, [shift], [place])
    counted = build.emit(aten.arange.default, padded_size(dim), dtype=torch.int64, device=build.device)
    moved = build.emit(aten.sub.Tensor, counted, build.scalar(shift))
    positions = build.emit(aten.remainder.Tensor, moved, build.scalar(single_factor(dim).size))
    return build.emit(aten.index_select.default, node, place, positions)
