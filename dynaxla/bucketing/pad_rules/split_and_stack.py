"""Rules of ops that split, stack, repeat and roll tensors."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import relaid, together
from dynaxla.bucketing.pad_rules.contiguous import flat, fronted
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.views import merged, piece
from dynaxla.bucketing.padded_value import Dim, Factor, Padded, Unpaddable, is_full, places, run_of
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten


@takes(dim=LAYOUT, split_sizes=TRUE_SIZE, split_size=TRUE_SIZE)
def split(call: Call) -> tuple[Padded, ...]:
    """Each piece begins at the true end of the one before it."""
    value: Padded = call.tensors[0]
    place = call.dim("dim", value)
    start: Size = 0
    results = []
    for wanted in call.node.meta["val"]:
        size = call.build.known_sizes(wanted)[place]
        factor = call.build.factor(size)
        dims = (*value.dims[:place], (factor,), *value.dims[place + 1 :])
        results.append(call.result(piece(call, value, place, factor, start), dims))
        start = start + size
    return tuple(results)


@takes(dim=LAYOUT)
def unbind(call: Call) -> tuple[Padded, ...]:
    """The unbound dim must have no padding; in other dims padding stays padding."""
    value: Padded = call.tensors[0]
    place = call.dim("dim", value)
    if not is_full(value.dims[place]):
        raise Unpaddable("the unbound dim varies")
    dims = (*value.dims[:place], *value.dims[place + 1 :])
    return call.results(call.same(), [dims] * places(value.dims[place]))


@takes(dim=LAYOUT)
def glu(call: Call) -> Padded:
    """The halved dim must have no padding; in other dims padding stays padding."""
    value: Padded = call.tensors[0]
    place = call.dim("dim", value)
    if not is_full(value.dims[place]):
        raise Unpaddable("the dim that is halved varies")
    half = places(value.dims[place]) // 2
    return call.result(call.same(), (*value.dims[:place], (Factor(half, half),), *value.dims[place + 1 :]))


@takes(dim=LAYOUT)
def stack(call: Call) -> Padded:
    """The new dim has no padding; in the others padding stays padding."""
    values = together(call, call["tensors"])
    dims = broadcast([value.dims for value in values])
    place = call["dim"] % (len(dims) + 1)
    count = len(values)
    return call.result(call.same(tensors=values), (*dims[:place], (Factor(count, count),), *dims[place:]))


@takes(repeats=BUCKET_SIZE)
def repeat(call: Call) -> Padded:
    """Copies follow each other with their padding, as a dim of several runs."""
    value: Padded = call.tensors[0]
    if any(is_fixed(count) and count < 1 for count in call["repeats"]):
        raise Unpaddable("it repeats zero times")
    new = len(call["repeats"]) - len(value.dims)
    old: tuple[Dim, ...] = (*[()] * new, *value.dims)
    counts = [call.build.factor(count) for count in call["repeats"]]
    dims = tuple(merged([f for f in (count, *dim) if f.size != 1]) for count, dim in zip(counts, old, strict=True))
    node = call.build.emit(aten.repeat.default, value.node, [count.padded for count in counts])
    # Padded copies repeat real elements, so the padding has no single fill value.
    return call.result(node, dims, value.fill if all(count.is_full for count in counts) else None)


@takes(shifts=TRUE_SIZE, dims=LAYOUT)
def roll(call: Call) -> Padded:
    """Positions are taken modulo the true size."""
    value: Padded = call.tensors[0]
    if not call["dims"]:
        return _roll_flat(call, value)
    for shift, place in zip(call["shifts"], [d % len(value.dims) for d in call["dims"]], strict=True):
        value = fronted(call, value, place)
        value = Padded(_rolled(call, value.node, value.dims[place], place, shift), value.dims)
    return call.result(value.node, value.dims)


def _roll_flat(call: Call, value: Padded) -> Padded:
    """roll without dims: rolls the flattened value."""
    row = flat(call, value)
    rolled = Padded(_rolled(call, row.node, row.dims[0], 0, call["shifts"][0]), row.dims)
    back = relaid(call, rolled, 0, tuple(factor for dim in value.dims for factor in dim))
    return call.result(call.build.emit(aten.view.default, back.node, list(value.meta.shape)), value.dims)


def _rolled(call: Call, node: Node, dim: Dim, place: int, shift: Size) -> Node:
    build = call.build
    if is_full(dim) and is_fixed(shift):
        return build.emit(aten.roll.default, node, [shift], [place])
    counted = build.emit(aten.arange.default, places(dim), dtype=torch.int64, device=build.device)
    moved = build.emit(aten.sub.Tensor, counted, build.scalar(shift))
    positions = build.emit(aten.remainder.Tensor, moved, build.scalar(run_of(dim).size))
    return build.emit(aten.index_select.default, node, place, positions)
