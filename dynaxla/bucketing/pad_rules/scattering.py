"""Rules of ops that write by index: padded indices are out of range, so that nothing is written there."""

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
# These take negative positions, counted from the end; the other ops take none.
_FROM_THE_END = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


@takes(dim=LAYOUT, value=CONSTANT, alpha=CONSTANT)
def scatter(call: Call) -> Padded:
    """scatter, index_add and similar ops: padded indices are set past the end, where nothing is written."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    if not value.dims:
        raise Unpaddable("it writes to a 0-d tensor")
    name = "src" if "src" in call.given else "source"
    source = call.get(name)
    value = fronted(call, value, place)
    if not call.op_name.startswith("index_"):
        value, index, source = _align_to_index(call, value, index, source, place)
    elif isinstance(source, Padded):
        source = _align_source(call, value, source, index.dims[0] if index.dims else _ONE, place)
    if call.node.target in _FROM_THE_END:
        index = from_front(call, index, value.dims[place])
    dropped = call.build.mask(index, range(len(index.dims)), places(value.dims[place]))
    changed = {name: source} if isinstance(source, Padded) else {}
    return call.result(call.same(self=value, index=dropped, **changed), value.dims)


def _align_to_index(
    call: Call, value: Padded, index: Padded, source: Padded | Number | None, place: int
) -> tuple[Padded, Padded, Padded | Number | None]:
    """Returns tensor, index and source, aligned with the index's real elements in all dims.

    The index may be smaller than the others: its real elements are then at the front of each dim, without padding.
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


def _align_source(call: Call, value: Padded, source: Padded, dim: Dim, place: int) -> Padded:
    """Returns the source aligned with the value; along the dim that is written, aligned with `dim`."""
    wanted = (*value.dims[:place], dim, *value.dims[place + 1 :])
    if not source.dims or len(source.dims) != len(wanted):
        raise Unpaddable("it writes elements of a tensor of other dims")
    for i, where in enumerate(wanted):
        source = relaid(call, source, i, where)
    return source


@takes()
def index_put(call: Call) -> Padded:
    """x[i, j] = values: padded indices are set past the end, where nothing is written."""
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
    """Returns the value with elements written by indices of neighbouring dims."""
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
    """The mask is False in padding; elements where it is True get the source's real elements in order."""
    value, mask = together(call, [call["self"], call["mask"]])
    dims = broadcast([value.dims, mask.dims])
    wide = call.build.emit(aten.expand.default, mask.node, list(map(places, dims)))
    chosen = call.build.mask(Padded(wide, dims), range(len(dims)), False)
    return call.result(call.same(self=value, mask=chosen, source=flat(call, call["source"])), dims)


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select_scatter(call: Call) -> Padded:
    """One position is written; negative positions count from the true end. Padding stays padding."""
    value: Padded = call["self"]
    place = call.dim("dim", value)
    return call.result(write_position(call, value, call["src"], place, call["index"]), value.dims)


def write_position(call: Call, value: Padded, source: Padded, place: int, index: Size) -> Node:
    """Returns the value with one position of a dim written; negative positions count from the true end."""
    unsqueezed = _align_source(call, value, _unsqueezed(call, source, place), _ONE, place)
    positions = _counted(call, value.dims[place])
    if is_fixed(index) and (index >= 0 or is_full(value.dims[place])):
        index = index % places(value.dims[place])
        run_of(value.dims[place])
        here = call.build.emit(aten.eq.Scalar, positions, index)
    else:
        here = call.build.emit(aten.eq.Tensor, positions, position(call, value, place, index))
    return _select_written(call, here, unsqueezed.node, value, place)


@takes(dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_scatter(call: Call) -> Padded:
    """Elements in the slice of the true size are replaced by the source's; all others are kept."""
    value: Padded = call["self"]
    place = call.dim("dim", value)
    node = write_slice(call, value, call["src"], place, call["start"] or 0, call["step"])
    return call.result(node, value.dims)


def write_slice(call: Call, value: Padded, source: Padded, place: int, start: Size, step: Size) -> Node:
    """Returns the value with a slice of a dim written; the slice is as long as the source."""
    build = call.build
    if places(source.dims[place]) == 0:
        return value.node
    run_of(value.dims[place])
    count = run_of(source.dims[place]).size
    source = _align_source(call, value, source, source.dims[place], place)
    first = position(call, value, place, start)
    moved = build.emit(aten.sub.Tensor, _counted(call, value.dims[place]), first)
    stride = build.scalar(step)
    turn = build.emit(aten.div.Tensor_mode, moved, stride, rounding_mode="floor")
    hits = build.emit(aten.eq.Scalar, build.emit(aten.remainder.Tensor, moved, stride), 0)
    inside = build.emit(aten.logical_and.default, hits, build.emit(aten.ge.Scalar, moved, 0))
    inside = build.emit(aten.logical_and.default, inside, build.emit(aten.lt.Tensor, turn, build.scalar(count)))
    clamped = build.emit(aten.clamp.default, turn, 0, places(source.dims[place]) - 1)
    written = build.emit(aten.index_select.default, source.node, place, clamped)
    return _select_written(call, inside, written, value, place)


def _counted(call: Call, dim: Dim) -> Node:
    return call.build.emit(aten.arange.default, places(dim), dtype=torch.int64, device=call.build.device)


def _unsqueezed(call: Call, source: Padded, place: int) -> Padded:
    node = call.build.emit(aten.unsqueeze.default, source.node, place)
    return Padded(node, (*source.dims[:place], _ONE, *source.dims[place:]))


def _select_written(call: Call, here: Node, written: Node, value: Padded, place: int) -> Node:
    """The written elements at the positions of a dim where `here` is True."""
    shape = [1] * len(value.dims)
    shape[place] = places(value.dims[place])
    build = call.build
    if written.meta["val"].dtype is not value.meta.dtype:
        written = build.emit(aten._to_copy.default, written, dtype=value.meta.dtype)
    return build.emit(aten.where.self, build.emit(aten.view.default, here, shape), written, value.node)
