"""Rules of ops that write by index: padded indices are out of range, so that nothing is written there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import align_values, move_elements, size_of_dim
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front, resize_dim
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.indexing import move_indexed_dims_to_front, wrap_negative_index
from dynaxla.bucketing.pad_rules.views import gather_to, wrapped_position
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    Number,
    PaddedValue,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
# These take negative positions, counted from the end; the other ops take none.
_FROM_THE_END = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


@takes(dim=LAYOUT, value=CONSTANT, alpha=CONSTANT)
def scatter(call: RuleContext) -> PaddedValue:
    """scatter, index_add and similar ops: padded indices are set past the end, where nothing is written."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    if not value.dims:
        raise Unpaddable("it writes to a 0-d tensor")
    name = "src" if "src" in call.given else "source"
    source = call.get(name)
    value = move_to_front(call, value, place)
    if not call.op_name.startswith("index_"):
        value, index, source = _align_to_index(call, value, index, source, place)
    elif isinstance(source, PaddedValue):
        source = _align_source(call, value, source, index.dims[0] if index.dims else _ONE, place)
    if call.node.target in _FROM_THE_END:
        index = wrap_negative_index(call, index, value.dims[place])
    dropped = call.build.mask(index, range(len(index.dims)), padded_size(value.dims[place]))
    changed = {name: source} if isinstance(source, PaddedValue) else {}
    return call.result(call.same(self=value, index=dropped, **changed), value.dims)


def _align_to_index(
    call: RuleContext, value: PaddedValue, index: PaddedValue, source: PaddedValue | Number | None, place: int
) -> tuple[PaddedValue, PaddedValue, PaddedValue | Number | None]:
    """Returns tensor, index and source, aligned with the index's real elements in all dims.

    The index may be smaller than the others: its real elements are then at the front of each dim, without padding.
    """
    for i in range(len(value.dims)):
        others = [v for v in (value if i != place else None, source) if isinstance(v, PaddedValue)]
        if all(have_same_layout(v.dims[i], index.dims[i]) for v in others):
            continue
        index = move_to_front(call, index, i)
        value = value if i == place else move_to_front(call, value, i)
        source = move_to_front(call, source, i) if isinstance(source, PaddedValue) else source
        others = [v for v in (value if i != place else None, source) if isinstance(v, PaddedValue)]
        least = min(padded_size(v.dims[i]) for v in others)
        if padded_size(index.dims[i]) > least:
            index = resize_dim(call, index, i, least)
    return value, index, source


def _align_source(call: RuleContext, value: PaddedValue, source: PaddedValue, dim: Dim, place: int) -> PaddedValue:
    """Returns the source aligned with the value; along the dim that is written, aligned with `dim`."""
    wanted = (*value.dims[:place], dim, *value.dims[place + 1 :])
    if not source.dims or len(source.dims) != len(wanted):
        raise Unpaddable("it writes elements of a tensor of other dims")
    for i, where in enumerate(wanted):
        source = move_elements(call, source, i, where)
    return source


@takes()
def index_put(call: RuleContext) -> PaddedValue:
    """x[i, j] = values: padded indices are set past the end, where nothing is written."""
    given = call["indices"]
    taken = [i for i, entry in enumerate(given) if entry is not None]
    if any(given[i].meta.dtype in (torch.bool, torch.uint8) for i in taken):
        return _put_where(call, call["self"], given, taken)
    value, entries = move_indexed_dims_to_front(call, call["self"], given)
    put = _put(call, value, entries)
    if entries == list(given):
        return call.result(put.node, put.dims)
    order = [*taken, *(d for d in range(len(value.dims)) if d not in taken)]
    back = sorted(range(len(order)), key=order.__getitem__)
    node = call.build.emit(aten.permute.default, put.node, back)
    return call.result(node, tuple(put.dims[d] for d in back))


def _put(call: RuleContext, value: PaddedValue, entries: Sequence[PaddedValue | None]) -> PaddedValue:
    """Returns the value with elements written by indices of neighbouring dims."""
    taken = [i for i, entry in enumerate(entries) if entry is not None]
    for place in taken:
        value = move_to_front(call, value, place)
    met = align_values(call, [entry for entry in entries if entry is not None])
    written = (*value.dims[: taken[0]], *broadcast([e.dims for e in met]), *value.dims[taken[-1] + 1 :])
    values = call["values"]
    for i in range(-len(values.dims), 0):
        if padded_size(values.dims[i]) != 1:
            values = move_elements(call, values, len(values.dims) + i, written[i])
    dropped = iter([_dropped(call, entry, value.dims[i]) for i, entry in zip(taken, met, strict=True)])
    indices = [None if entry is None else next(dropped) for entry in entries]
    return PaddedValue(call.same(self=value, indices=indices, values=values), value.dims)


def _dropped(call: RuleContext, index: PaddedValue, dim: Dim) -> PaddedValue:
    counted = wrap_negative_index(call, index, dim)
    wide = counted
    if index.meta.dtype is not torch.int64:
        wide = PaddedValue(call.build.emit(aten._to_copy.default, counted.node, dtype=torch.int64), index.dims)
    return call.build.mask(wide, range(len(index.dims)), padded_size(dim))


def _put_where(
    call: RuleContext, value: PaddedValue, given: Sequence[PaddedValue | None], taken: list[int]
) -> PaddedValue:
    """One value is written wherever a boolean mask is True."""
    mask = given[taken[0]]
    assert mask is not None
    behind = taken[0] + len(mask.dims)
    if len(taken) > 1 or any(size != 1 for size in call["values"].meta.shape):
        raise Unpaddable("a boolean index with several values")
    for i, dim in enumerate(value.dims[taken[0] : behind]):
        mask = move_elements(call, mask, i, dim)
    return call.result(call.same(indices=[*given[: taken[0]], mask, *given[taken[0] + 1 :]]), value.dims)


@takes()
def masked_scatter(call: RuleContext) -> PaddedValue:
    """The mask is False in padding; elements where it is True get the source's real elements in order."""
    value, chosen = _align_to_mask(call, call["self"])
    return call.result(call.same(self=value, mask=chosen, source=flatten(call, call["source"])), chosen.dims)


@takes(sizes=BUCKET_SIZE)
def masked_scatter_backward(call: RuleContext) -> PaddedValue:
    """The mask is False in padding; what it chooses is in front of the result, in order."""
    grad, chosen = _align_to_mask(call, call["grad_output"])
    dims = call.build.dims(call.true_sizes)
    if 0 in map(padded_size, dims):  # the mask chooses nothing
        sizes = list(map(padded_size, dims))
        made = call.build.emit(aten.full.default, sizes, 0, dtype=grad.meta.dtype, device=call.build.device)
        return call.result(made, dims)
    row: Dim = tuple(factor for dim in dims for factor in dim)
    read = call.build.emit(aten.masked_scatter_backward.default, grad.node, chosen.node, [padded_size(row)])
    front = PaddedValue(read, ((Factor(padded_size(row), size_of_dim(row)),),))
    moved, dims = gather_to(call, front, call.true_sizes)
    return call.result(call.build.emit(aten.view.default, moved.node, list(map(padded_size, dims))), dims)


def _align_to_mask(call: RuleContext, value: PaddedValue) -> tuple[PaddedValue, PaddedValue]:
    """The value, and the mask as wide as both, False in padding."""
    value, mask = align_values(call, [value, call["mask"]])
    dims = broadcast([value.dims, mask.dims])
    wide = call.build.emit(aten.expand.default, mask.node, list(map(padded_size, dims)))
    return value, call.build.mask(PaddedValue(wide, dims), range(len(dims)), False)


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select_scatter(call: RuleContext) -> PaddedValue:
    """One position is written; negative positions count from the true end. Padding stays padding."""
    value: PaddedValue = call["self"]
    place = call.dim("dim", value)
    return call.result(write_position(call, value, call["src"], place, call["index"]), value.dims)


def write_position(call: RuleContext, value: PaddedValue, source: PaddedValue, place: int, index: Size) -> Node:
    """Returns the value with one position of a dim written; negative positions count from the true end."""
    unsqueezed = _align_source(call, value, _unsqueezed(call, source, place), _ONE, place)
    positions = _counted(call, value.dims[place])
    if is_fixed(index) and (index >= 0 or is_full(value.dims[place])):
        index = index % padded_size(value.dims[place])
        single_factor(value.dims[place])
        here = call.build.emit(aten.eq.Scalar, positions, index)
    else:
        here = call.build.emit(aten.eq.Tensor, positions, wrapped_position(call, value, place, index))
    return _select_written(call, here, unsqueezed.node, value, place)


@takes(dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_scatter(call: RuleContext) -> PaddedValue:
    """Elements in the slice of the true size are replaced by the source's; all others are kept."""
    value: PaddedValue = call["self"]
    place = call.dim("dim", value)
    node = write_slice(call, value, call["src"], place, call["start"] or 0, call["step"])
    return call.result(node, value.dims)


def write_slice(
    call: RuleContext, value: PaddedValue, source: PaddedValue, place: int, start: Size, step: Size
) -> Node:
    """Returns the value with a slice of a dim written; the slice is as long as the source."""
    build = call.build
    if padded_size(source.dims[place]) == 0:
        return value.node
    single_factor(value.dims[place])
    count = single_factor(source.dims[place]).size
    source = _align_source(call, value, source, source.dims[place], place)
    first = wrapped_position(call, value, place, start)
    moved = build.emit(aten.sub.Tensor, _counted(call, value.dims[place]), first)
    stride = build.scalar(step)
    turn = build.emit(aten.div.Tensor_mode, moved, stride, rounding_mode="floor")
    hits = build.emit(aten.eq.Scalar, build.emit(aten.remainder.Tensor, moved, stride), 0)
    inside = build.emit(aten.logical_and.default, hits, build.emit(aten.ge.Scalar, moved, 0))
    inside = build.emit(aten.logical_and.default, inside, build.emit(aten.lt.Tensor, turn, build.scalar(count)))
    clamped = build.emit(aten.clamp.default, turn, 0, padded_size(source.dims[place]) - 1)
    written = build.emit(aten.index_select.default, source.node, place, clamped)
    return _select_written(call, inside, written, value, place)


def _counted(call: RuleContext, dim: Dim) -> Node:
    return call.build.emit(aten.arange.default, padded_size(dim), dtype=torch.int64, device=call.build.device)


def _unsqueezed(call: RuleContext, source: PaddedValue, place: int) -> PaddedValue:
    node = call.build.emit(aten.unsqueeze.default, source.node, place)
    return PaddedValue(node, (*source.dims[:place], _ONE, *source.dims[place:]))


def _select_written(call: RuleContext, here: Node, written: Node, value: PaddedValue, place: int) -> Node:
    """The written elements at the positions of a dim where `here` is True."""
    shape = [1] * len(value.dims)
    shape[place] = padded_size(value.dims[place])
    build = call.build
    if written.meta["val"].dtype is not value.meta.dtype:
        written = build.emit(aten._to_copy.default, written, dtype=value.meta.dtype)
    return build.emit(aten.where.self, build.emit(aten.view.default, here, shape), written, value.node)
