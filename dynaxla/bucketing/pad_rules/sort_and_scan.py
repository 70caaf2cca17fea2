"""Rules of scans, sorts, top-k, medians and searches."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import size_of_dim
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front
from dynaxla.bucketing.pad_rules.reductions import (
    lowest_value,
    make_results,
    reduced_shape,
    sorts_last_value,
)
from dynaxla.bucketing.padded_value import (
    PaddedValue,
    Results,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_fixed
from dynaxla.custom_ops.search_rows import SEARCH_ROWS

aten = torch.ops.aten


@takes(dim=LAYOUT)
def cumulative(call: RuleContext) -> Results:
    """Real elements come first, and each result depends only on elements before it, so that no padding is read."""
    value: PaddedValue = call.tensors[0]
    value = move_to_front(call, value, call.dim("dim", value))
    return make_results(call, call.same(self=value), value.dims)


@takes(dim=LAYOUT)
def sort(call: RuleContext) -> Results:
    """Padding is set to the value that sorts last, and the sort is stable, so that equal real elements stay in front of it."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    if is_full(value.dims[place]):
        return make_results(call, call.same(), value.dims)
    value = move_to_front(call, value, place)
    dtype = value.meta.dtype
    descending = bool(call["descending"])
    filled = call.build.mask(value, [place], lowest_value(dtype) if descending else sorts_last_value(dtype))
    node = call.build.emit(aten.sort.stable, filled.node, stable=True, dim=place, descending=descending)
    return make_results(call, node, value.dims)


@takes(k=TRUE_SIZE, dim=LAYOUT)
def topk(call: RuleContext) -> Results:
    """Padding is set to the lowest (or highest) value, and comes after real elements that are equal to it."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    value = move_to_front(call, value, place)
    fill = lowest_value(value.meta.dtype) if call["largest"] else sorts_last_value(value.meta.dtype)
    filled = call.build.mask(value, [place], fill)
    factor = call.build.factor(call["k"])
    dims = (*value.dims[:place], (factor,), *value.dims[place + 1 :])
    if factor.is_full:
        return make_results(call, call.same(self=filled), dims)
    return tuple(
        call.result(call.build.resize(node, place, factor.padded), dims)
        for node in _sort_stable(call, filled, place, bool(call["largest"]))
    )


@takes(k=TRUE_SIZE, dim=LAYOUT)
def kth_value(call: RuleContext) -> Results:
    """Padding is set to the value that sorts last, so that the smallest elements are real."""
    value: PaddedValue = call["self"]
    place = call.dim("dim", value)
    value = move_to_front(call, value, place)
    filled = call.build.mask(value, [place], sorts_last_value(value.meta.dtype))
    dims = reduced_shape(call, value, [place])
    if is_fixed(call["k"]):
        return make_results(call, call.same(self=filled), dims)
    wanted = call.build.emit(aten.view.default, call.build.scalar(call["k"] - 1), [1])
    picked = [
        call.build.emit(aten.index_select.default, n, place, wanted) for n in _sort_stable(call, filled, place, False)
    ]
    shape = [padded_size(dim) for dim in dims]
    return tuple(call.result(call.build.emit(aten.view.default, node, shape), dims) for node in picked)


def _sort_stable(call: RuleContext, value: PaddedValue, place: int, descending: bool) -> tuple[Node, Node]:
    """The elements of a dim in a stable sort, and their indices."""
    made = call.build.emit(aten.sort.stable, value.node, stable=True, dim=place, descending=descending)
    values, positions = (call.build.emit(operator.getitem, made, i) for i in range(2))
    return values, positions


@takes(dim=LAYOUT)
def median(call: RuleContext) -> Results:
    """Padding is set to the value that sorts last; the median is that of the true count, the first NaN, or of the numbers."""
    value: PaddedValue = call["self"]
    if "dim" not in call.given:
        return call.result(_median_of_all(call, flatten(call, value)), ())
    place = call.dim("dim", value)
    value = move_to_front(call, value, place)
    made = _pick_medians(call, value, place, bool(call["keepdim"]))
    return tuple(call.result(node, reduced_shape(call, value, [place])) for node in made)


def _median_of_all(call: RuleContext, row: PaddedValue) -> Node:
    """The median of a row, or what torch gives for no elements: NaN, or the integer to which it converts NaN."""
    if not padded_size(row.dims[0]):
        return call.same(self=row)
    of_none = torch.nan if row.meta.dtype.is_floating_point else torch.iinfo(row.meta.dtype).min
    picked = _pick_medians(call, row, 0, False)[0]
    is_empty = call.build.emit(aten.eq.Scalar, call.build.scalar(size_of_dim(row.dims[0])), 0)
    return call.build.emit(aten.masked_fill.Scalar, picked, is_empty, of_none)


def _pick_medians(call: RuleContext, value: PaddedValue, place: int, keepdim: bool) -> tuple[Node, ...]:
    """The medians and their indices."""
    build = call.build
    filled = build.mask(value, [place], sorts_last_value(value.meta.dtype))
    values, positions = _sort_stable(call, filled, place, False)
    count = build.scalar(size_of_dim(value.dims[place]))
    middle = _middle(call, count)
    if value.meta.dtype.is_floating_point:
        is_nan = PaddedValue(build.emit(aten.isnan.default, value.node), value.dims)
        nans = build.emit(
            aten.sum.dim_IntList, build.mask(is_nan, [place], False).node, [place], True, dtype=torch.int64
        )
        numbers = build.emit(aten.sub.Tensor, count, nans)
        if call.op_name == "nanmedian":
            middle = build.emit(aten.clamp.default, _middle(call, numbers), 0)
        else:  # the numbers are in front of the NaNs
            middle = build.emit(aten.where.self, build.emit(aten.gt.Scalar, nans, 0), numbers, middle)
    shape = [1 if i == place else size for i, size in enumerate(value.meta.shape)]
    where = build.emit(aten.expand.default, middle, shape)
    picked = [build.emit(aten.gather.default, node, place, where) for node in (values, positions)]
    return tuple(picked if keepdim else [build.emit(aten.squeeze.dim, node, place) for node in picked])


def _middle(call: RuleContext, count: Node) -> Node:
    """The position of the lower median among so many."""
    last = call.build.emit(aten.sub.Tensor, count, 1)
    return call.build.emit(aten.div.Tensor_mode, last, 2, rounding_mode="floor")


@takes()
def search(call: RuleContext) -> PaddedValue:
    """bucketize, searchsorted: the true elements of the sorted row are searched, at the steps that their number gives."""
    names = ("boundaries", "self") if "boundaries" in call.given else ("sorted_sequence", "self")
    rows: PaddedValue = call[names[0]]
    wanted = call[names[1]]
    if not isinstance(wanted, PaddedValue) or call.get("sorter") is not None:
        raise Unpaddable("it searches for a plain number, or has a sorter")
    if len(rows.dims) > 1 and not all(map(have_same_layout, rows.dims[:-1], wanted.dims[:-1])):
        raise Unpaddable("rows and values hold their real elements in different places")
    rows = move_to_front(call, rows, len(rows.dims) - 1)
    run = single_factor(rows.dims[-1])
    if run.is_full:
        return call.result(call.same(**{names[0]: rows}), wanted.dims)
    is_right = bool(call.get("right")) or call.get("side") == "right"
    count, as_int32 = call.build.scalar(run.size), bool(call.get("out_int32"))
    node = call.build.emit(SEARCH_ROWS, rows.node, wanted.node, count, is_right, as_int32)
    return call.result(node, wanted.dims)
