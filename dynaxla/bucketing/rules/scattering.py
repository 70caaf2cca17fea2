"""Rules of ops that write by position: what padding says is written nowhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dynaxla.bucketing.arguments import CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules.elementwise import broadcast
from dynaxla.bucketing.rules.indexing import from_front
from dynaxla.bucketing.rules.views import position
from dynaxla.bucketing.sizes import Size, is_fixed
from dynaxla.bucketing.values import Dim, Factor, Padded, Refusal, is_full, joined, places, run_of, same_places

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
_FROM_THE_END = (
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
)  # their negative positions count so; others raise


@takes(dim=LAYOUT, value=CONSTANT, alpha=CONSTANT)
def scatter(call: Call) -> Padded:
    """scatter and index_add and their like: padded positions are the place behind the last one, which is dropped."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    if not value.dims:
        raise Refusal("it writes to a tensor of no dims")
    run_of(value.dims[place])
    by_slice = call.node.target._opname.startswith("index_")  # type: ignore[union-attr]
    source = call.get("src", call.get("source"))
    if by_slice:
        _require_slices(value, source, index, place)
    else:
        _require_corner(value, index, place)
        if isinstance(source, Padded):
            _require_corner(source, index, None)
    if call.node.target in _FROM_THE_END:
        index = from_front(call, index, value.dims[place])
    dropped = call.build.mask(index, range(len(index.dims)), places(value.dims[place]))
    return call.result(call.same(index=dropped), value.dims)


def _require_corner(value: Padded, index: Padded, place: int | None) -> None:
    """Raises Refusal where a real position of the index speaks of padding: beside the dim that is written along."""
    for i, (dim, wanted) in enumerate(zip(value.dims, index.dims, strict=True)):
        if i == place or same_places(dim, wanted):
            continue
        if len(joined(wanted)) > 1 or len(joined(dim)) > 1 or places(wanted) > places(dim):
            raise Refusal("index and tensor hold their real elements in different places")


def _require_slices(value: Padded, source: Any, index: Padded, place: int) -> None:
    if not isinstance(source, Padded):
        return
    wanted = (*value.dims[:place], index.dims[0] if index.dims else _ONE, *value.dims[place + 1 :])
    if not source.dims or len(source.dims) != len(wanted):
        raise Refusal("it writes elements of a tensor of other dims")
    if not all(same_places(dim, other) for dim, other in zip(source.dims, wanted, strict=True)):
        raise Refusal("source and tensor hold their real elements in different places")


@takes()
def index_put(call: Call) -> Padded:
    """x[i, j] = values."""
    value, given = call["self"], call["indices"]
    taken = [i for i, entry in enumerate(given) if entry is not None]
    if any(given[i].meta.dtype in (torch.bool, torch.uint8) for i in taken):
        return _put_where(call, value, given, taken)
    if taken != list(range(taken[0], taken[-1] + 1)):
        raise Refusal("indices with a dim between them")
    picked = broadcast([given[i].dims for i in taken])
    broadcast([call["values"].dims, (*value.dims[: taken[0]], *picked, *value.dims[taken[-1] + 1 :])])
    entries = [None if e is None else _dropped(call, e, value.dims[i]) for i, e in enumerate(given)]
    return call.result(call.same(indices=entries), value.dims)


def _dropped(call: Call, index: Padded, dim: Dim) -> Padded:
    counted = from_front(call, index, dim)
    wide = counted
    if index.meta.dtype is not torch.int64:
        wide = Padded(call.build.emit(aten._to_copy.default, counted.node, dtype=torch.int64), index.dims)
    return call.build.mask(wide, range(len(index.dims)), places(dim))


def _put_where(call: Call, value: Padded, given: Any, taken: list[int]) -> Padded:
    """One value wherever a mask says so."""
    mask = given[taken[0]]
    behind = taken[0] + len(mask.dims)
    if len(taken) > 1 or any(is_number != 1 for is_number in call["values"].meta.shape):
        raise Refusal("a boolean index with several values")
    if not all(same_places(d, m) for d, m in zip(value.dims[taken[0] : behind], mask.dims, strict=True)):
        raise Refusal("mask and tensor hold their real elements in different places")
    return call.result(call.same(), value.dims)


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select_scatter(call: Call) -> Padded:
    """One position of a dim is written."""
    value: Padded = call["self"]
    place = call.dim("dim", value)
    return call.result(write_position(call, value, call["src"], place, call["index"]), value.dims)


def write_position(call: Call, value: Padded, source: Padded, place: int, index: Any) -> Node:
    """The value with one position of a dim written; negative ones count from the true end."""
    unsqueezed = _unsqueezed(call, source, place)
    _require_slices(value, unsqueezed, Padded(source.node, (_ONE,)), place)
    positions = _counted(call, value.dims[place])
    if is_fixed(index) and (index >= 0 or is_full(value.dims[place])):
        index = index % places(value.dims[place])
        run_of(value.dims[place])
        here = call.build.emit(aten.eq.Scalar, positions, index)
    else:
        here = call.build.emit(aten.eq.Tensor, positions, position(call, value, place, index))
    return _chosen(call, here, unsqueezed.node, value, place)


@takes(dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_scatter(call: Call) -> Padded:
    """Every place of the dim reads the source's element, if it lies in the slice, or its own."""
    value: Padded = call["self"]
    place = call.dim("dim", value)
    node = write_slice(call, value, call["src"], place, call["start"] or 0, call["step"])
    return call.result(node, value.dims)


def write_slice(call: Call, value: Padded, source: Padded, place: int, start: Size, step: Size) -> Node:
    """The value with the places of a slice of a dim written; their number is the source's."""
    build = call.build
    if places(source.dims[place]) == 0:
        return value.node
    run_of(value.dims[place])
    count = run_of(source.dims[place]).size
    others = [i for i in range(len(value.dims)) if i != place]
    if not all(same_places(value.dims[i], source.dims[i]) for i in others):
        raise Refusal("source and tensor hold their real elements in different places")
    first = position(call, value, place, start)
    moved = build.emit(aten.sub.Tensor, _counted(call, value.dims[place]), first)
    stride = build.scalar(step)
    turn = build.emit(aten.div.Tensor_mode, moved, stride, rounding_mode="floor")
    hits = build.emit(aten.eq.Scalar, build.emit(aten.remainder.Tensor, moved, stride), 0)
    inside = build.emit(aten.logical_and.default, hits, build.emit(aten.ge.Scalar, moved, 0))
    inside = build.emit(aten.logical_and.default, inside, build.emit(aten.lt.Tensor, turn, build.scalar(count)))
    clamped = build.emit(aten.clamp.default, turn, 0, places(source.dims[place]) - 1)
    written = build.emit(aten.index_select.default, source.node, place, clamped)
    return _chosen(call, inside, written, value, place)


def _counted(call: Call, dim: Dim) -> Node:
    return call.build.emit(aten.arange.default, places(dim), dtype=torch.int64, device=call.build.device)


def _unsqueezed(call: Call, source: Padded, place: int) -> Padded:
    node = call.build.emit(aten.unsqueeze.default, source.node, place)
    return Padded(node, (*source.dims[:place], _ONE, *source.dims[place:]))


def _chosen(call: Call, here: Node, written: Node, value: Padded, place: int) -> Node:
    """The written elements at the places along a dim where `here` is true."""
    shape = [1] * len(value.dims)
    shape[place] = places(value.dims[place])
    build = call.build
    if written.meta["val"].dtype is not value.meta.dtype:
        written = build.emit(aten._to_copy.default, written, dtype=value.meta.dtype)
    return build.emit(aten.where.self, build.emit(aten.view.default, here, shape), written, value.node)
