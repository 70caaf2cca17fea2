"""Rules of ops that write by position: elements at padded positions are written nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import relaid, together
from dynaxla.bucketing.pad_rules.contiguous import flat, fronted, recut
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.indexing import from_front, in_front
from dynaxla.bucketing.pad_rules.views import position
from dynaxla.bucketing.padded_value import Dim, Factor, Number, Padded, Unpaddable, is_full, places, run_of, same_places
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
# Their negative positions count from the end; the others take none.
_FROM_THE_END = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


@takes(dim=LAYOUT, value=CONSTANT, alpha=CONSTANT)
def scatter(call: Call) -> Padded:
    """scatter, index_add and their like: padded positions are set behind the last place, where nothing is written."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    if not value.dims:
        raise Unpaddable("it writes to a tensor of no dims")
    name = "src" if "src" in call.given else "source"
    source = call.get(name)
    value = fronted(call, value, place)
    if not call.op_name.startswith("index_"):
        value, index, source = _cornered(call, value, index, source, place)
    elif isinstance(source, Padded):
        source = _slices_of(call, value, source, index.dims[0] if index.dims else _ONE, place)
    if call.node.target in _FROM_THE_END:
        index = from_front(call, index, value.dims[place])
    dropped = call.build.mask(index, range(len(index.dims)), places(value.dims[place]))
    changed = {name: source} if isinstance(source, Padded) else {}
    return call.result(call.same(self=value, index=dropped, **changed), value.dims)


def _cornered(
    call: Call, value: Padded, index: Padded, source: Padded | Number | None, place: int
) -> tuple[Padded, Padded, Padded | Number | None]:
    """Tensor, index and source, so that the index' real elements are in the same places in all dims.

    The index may be smaller than the others: its real elements are then in the corner, and it has no more places.
    """
    for i in range(len(value.dims)):
        others = [v for v in (value if i != place else None, source) if isinstance(v, Padded)]
        if all(same_places(v.dims[i], index.dims[i]) for v in others):
            continue
        index = fronted(call, index, i)
        value = value if i == place else fronted(call, value, i)
        source = fronted(call, source, i) if isinstance(source, Padded) else source
        others = [v for v in (value if i != place else None, source) if isinstance(v, Padded)]
        least = min(places(v.dims[i]) for v in others)
        if places(index.dims[i]) > least:
            index = recut(call, index, i, least)
    return value, index, source


def _slices_of(call: Call, value: Padded, source: Padded, dim: Dim, place: int) -> Padded:
    """The source with its real elements where they are in the value; along the dim that is written, in those of `dim`."""
    wanted = (*value.dims[:place], dim, *value.dims[place + 1 :])
    if not source.dims or len(source.dims) != len(wanted):
        raise Unpaddable("it writes elements of a tensor of other dims")
    for i, where in enumerate(wanted):
        source = relaid(call, source, i, where)
    return source


@takes()
def index_put(call: Call) -> Padded:
    """x[i, j] = values: padded positions are set behind the last place, where nothing is written."""
    given = call["indices"]
    taken = [i for i, entry in enumerate(given) if entry is not None]
    if any(given[i].meta.dtype in (torch.bool, torch.uint8) for i in taken):
        return _put_where(call, call["self"], given, taken)
    value, entries = in_front(call, call["self"], given)
    put = _put(call, value, entries)
    if entries == list(given):
        return call.result(put.node, put.dims)
    order = [*taken, *(d for d in range(len(value.dims)) if d not in taken)]
    back = sorted(range(len(order)), key=order.__getitem__)
    node = call.build.emit(aten.permute.default, put.node, back)
    return call.result(node, tuple(put.dims[d] for d in back))


def _put(call: Call, value: Padded, entries: Sequence[Padded | None]) -> Padded:
    """The value with elements written by indices of neighbouring dims."""
    taken = [i for i, entry in enumerate(entries) if entry is not None]
    for place in taken:
        value = fronted(call, value, place)
    met = together(call, [entry for entry in entries if entry is not None])
    written = (*value.dims[: taken[0]], *broadcast([e.dims for e in met]), *value.dims[taken[-1] + 1 :])
    values = call["values"]
    for i in range(-len(values.dims), 0):
        if places(values.dims[i]) != 1:
            values = relaid(call, values, len(values.dims) + i, written[i])
    dropped = iter([_dropped(call, entry, value.dims[i]) for i, entry in zip(taken, met, strict=True)])
    indices = [None if entry is None else next(dropped) for entry in entries]
    return Padded(call.same(self=value, indices=indices, values=values), value.dims)


def _dropped(call: Call, index: Padded, dim: Dim) -> Padded:
    counted = from_front(call, index, dim)
    wide = counted
    if index.meta.dtype is not torch.int64:
        wide = Padded(call.build.emit(aten._to_copy.default, counted.node, dtype=torch.int64), index.dims)
    return call.build.mask(wide, range(len(index.dims)), places(dim))


def _put_where(call: Call, value: Padded, given: Sequence[Padded | None], taken: list[int]) -> Padded:
    """One value is written wherever a boolean mask is True."""
    mask = given[taken[0]]
    assert mask is not None
    behind = taken[0] + len(mask.dims)
    if len(taken) > 1 or any(size != 1 for size in call["values"].meta.shape):
        raise Unpaddable("a boolean index with several values")
    for i, dim in enumerate(value.dims[taken[0] : behind]):
        mask = relaid(call, mask, i, dim)
    return call.result(call.same(indices=[*given[: taken[0]], mask, *given[taken[0] + 1 :]]), value.dims)


@takes()
def masked_scatter(call: Call) -> Padded:
    """The true places of the mask, of which padding is none, take the real elements of the source in their order."""
    value, mask = together(call, [call["self"], call["mask"]])
    dims = broadcast([value.dims, mask.dims])
    wide = call.build.emit(aten.expand.default, mask.node, list(map(places, dims)))
    chosen = call.build.mask(Padded(wide, dims), range(len(dims)), False)
    return call.result(call.same(self=value, mask=chosen, source=flat(call, call["source"])), dims)


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select_scatter(call: Call) -> Padded:
    """One position is written, counted from the true end where it is negative; padding stays padding."""
    value: Padded = call["self"]
    place = call.dim("dim", value)
    return call.result(write_position(call, value, call["src"], place, call["index"]), value.dims)


def write_position(call: Call, value: Padded, source: Padded, place: int, index: Size) -> Node:
    """The value with one position of a dim written; negative ones count from the true end."""
    unsqueezed = _slices_of(call, value, _unsqueezed(call, source, place), _ONE, place)
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
    """Places in the slice, which is that of the true size, read the source; all others keep their element."""
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
    source = _slices_of(call, value, source, source.dims[place], place)
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
