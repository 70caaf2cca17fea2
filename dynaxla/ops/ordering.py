"""Sorting, top-k, medians, modes, argmax and argmin.

NaN counts as larger than every number, as in torch. All sorts are stable; torch does not define which of several equal
elements topk, kthvalue and median return the index of.

XLA's CPU client sorts one operand of integers in a tenth of the time of a pair of elements and places, which it also compares
by a slower order where the elements are floats. There, elements are sorted by keys: whole numbers that hold an element and
its place. `python -m benchmarks.op_speed` measures sorts.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import reductions as reductions_rules
from dynaxla.bucketing.pad_rules import sort_and_scan as sort_and_scan_rules
from dynaxla.ops.axes_and_dtypes import as_vector, axis_of, is_float, is_nan, slice_axis
from dynaxla.ops.dtypes import REAL, REAL_NUMBERS
from dynaxla.ops.eager_errors import check_dim, check_has_elements
from dynaxla.ops.record import OpFamily
from dynaxla.ops.reductions import amax, amin
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
OPS = OpFamily()
TIES = "which of several equal elements the index refers to is undefined, as in torch"

Pair = tuple[jax.Array, jax.Array]

_FEWEST_PER_LARGEST = 4
"""Elements of a row per largest one that is sought, from which finding these takes less time than sorting the row."""

_PLACES = 32
"""Bits of a key that hold the place."""

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
"""The bits of float32's infinity, and of a NaN."""


def sort_with_indices(x: jax.Array, axis: int, descending: bool) -> Pair:
    """`x` sorted along `axis`, and each element's index in `x` as int64; NaN last, or first if descending."""

    def by_keys(x: jax.Array) -> Pair:
        return sort_by_keys(x, axis, descending=descending)

    def as_pairs(x: jax.Array) -> Pair:
        return _sort_pairs(x, axis, descending)

    return lax.platform_dependent(x, cpu=by_keys, default=as_pairs) if has_keys(x) else as_pairs(x)


def _sort_pairs(x: jax.Array, axis: int, descending: bool) -> Pair:
    places = lax.broadcasted_iota(jnp.int64, x.shape, axis)
    if descending:  # sorting the reversed row and reversing the result keeps equal elements in order
        values, order = lax.sort((lax.rev(x, (axis,)), lax.rev(places, (axis,))), dimension=axis, num_keys=1)
        return lax.rev(values, (axis,)), lax.rev(order, (axis,))
    values, order = lax.sort((x, places), dimension=axis, num_keys=1)
    return values, order


def has_keys(x: jax.Array) -> bool:
    """Whether a key of 64 bits can hold an element of x and any place."""
    return (
        x.dtype.itemsize <= 4
        and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        and max(x.shape, default=0) < 1 << _PLACES
    )


def sort_by_keys(x: jax.Array, axis: int, *, descending: bool) -> Pair:
    """The elements of x in order along an axis, and their places as int64. Equal elements stay in order, also if descending.

    NaN is larger than every number, whatever its sign, and zeros are equal.
    """
    order = order_of(x)
    keys = ((~order if descending else order) << _PLACES) | lax.broadcasted_iota(jnp.int64, x.shape, axis)
    places = lax.sort(keys, dimension=axis, is_stable=False) & ((1 << _PLACES) - 1)
    return take_along(x, places, axis), places


def order_of(x: jax.Array) -> jax.Array:
    """For each element a whole number of 32 bits, as int64: of two elements the larger has the larger number."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int64) - ((1 << 31) if x.dtype == jnp.uint32 else 0)
    bits = _bits_of(x)
    size = bits & 0x7FFFFFFF  # a comparison of floats would count the smallest numbers as zeros
    bits = jnp.where(size == 0, 0, jnp.where(size > _INFINITY, _NAN, bits))
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(jnp.int64)


def _bits_of(x: jax.Array) -> jax.Array:
    """The bits of x as float32."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def find_largest(x: jax.Array, count: int, *, descending: bool) -> Pair:
    """The first `count` elements of each row of x [..., n], as `sort_by_keys` orders them, and their places.

    XLA's CPU client does not sort for it where count < n.
    """
    order = order_of(x)
    order = order if descending else ~order
    bits = jnp.where(order < 0, order ^ 0x7FFFFFFF, order).astype(jnp.int32)
    rows = lax.bitcast_convert_type(bits, jnp.float32).reshape(-1, x.shape[-1])
    places = lax.top_k(rows, count)[1].reshape(*x.shape[:-1], count).astype(jnp.int64)
    return take_along(x, places, -1), places


def select_in_order(x: jax.Array, axis: int, count: jax.Array) -> Pair:
    """Of each row along an axis, which is kept, the element that `count` others precede in order, and its place as int64.

    Args:
        count: a number, or one per row, as int64.
    """

    def by_bisection(x: jax.Array) -> Pair:
        x = lax.optimization_barrier(x)  # as in `place_of_extreme`
        order = order_of(x).astype(jnp.int32) if has_keys(x) else _order_of_wide(x)
        places = lax.broadcasted_iota(_places_dtype(x.shape[axis]), x.shape, axis)
        is_wanted = order == _bisect(order, axis, count)
        place = jnp.min(jnp.where(is_wanted, places, x.shape[axis] - 1), axis, keepdims=True).astype(jnp.int64)
        return take_along(x, place, axis), place

    def by_sorting(x: jax.Array) -> Pair:
        values, places = sort_with_indices(x, axis, False)
        wanted = jnp.broadcast_to(count, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
        return take_along(values, wanted, axis), take_along(places, wanted, axis)

    chosen: Pair = lax.platform_dependent(x, cpu=by_bisection, default=by_sorting)
    return chosen


def _bisect(order: jax.Array, axis: int, count: jax.Array) -> jax.Array:
    """The whole number of each row that `count` others precede in order, bit by bit: the largest that so many are below."""
    info, counts = jnp.iinfo(order.dtype), _places_dtype(order.shape[axis])

    def below(number: jax.Array | int) -> jax.Array:
        return jnp.sum(order < number, axis, counts, keepdims=True)

    def set_bit(i: jax.Array, number: jax.Array) -> jax.Array:
        higher = number + (jnp.asarray(1, order.dtype) << (info.bits - 2 - i).astype(order.dtype))
        return jnp.where(below(higher) <= count, higher, number)

    start = jnp.where(below(0) <= count, jnp.asarray(0, order.dtype), jnp.asarray(info.min, order.dtype))
    found: jax.Array = lax.fori_loop(0, info.bits - 1, set_bit, start)
    return found


def _places_dtype(size: int) -> np.dtype:
    """The dtype that counts a row's elements in the least time."""
    return np.dtype(np.int32 if size < 1 << 31 else np.int64)


def _order_of_wide(x: jax.Array) -> jax.Array:
    """As `order_of`, of elements of 64 bits, of rows of any length."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int64)
    all_but_sign = jnp.iinfo(jnp.int64).max
    bits = lax.bitcast_convert_type(x.astype(jnp.float64), jnp.int64)
    bits = jnp.where(bits & all_but_sign == 0, 0, jnp.where(jnp.isnan(x), all_but_sign, bits))
    return jnp.where(bits < 0, bits ^ all_but_sign, bits)


def take_along(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """The elements of `x` at the indices `places` of an axis."""
    return jnp.take_along_axis(x, places, axis, mode="promise_in_bounds")


def restore_shape(pair: Pair, x: jax.Array, axis: int, keepdim: bool) -> Pair:
    """Two results with `axis` (of size 1) kept, reshaped to torch's result shape for input `x`."""
    values, places = pair
    if x.ndim == 0:
        return values.reshape(()), places.reshape(())
    return (values, places) if keepdim else (lax.squeeze(values, (axis,)), lax.squeeze(places, (axis,)))


@OPS.op(aten.sort.default, check=check_dim, dtypes=REAL, pad=sort_and_scan_rules.sort)
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> Pair:
    values, places = sort_with_indices(as_vector(x), axis_of(dim, x.ndim), descending)
    return values.reshape(x.shape), places.reshape(x.shape)


@OPS.op(aten.sort.stable, check=check_dim, dtypes=REAL, pad=sort_and_scan_rules.sort)
def sort_stable(x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Pair:
    return sort(x, dim, descending)


@OPS.op(aten.argsort.default, check=check_dim, dtypes=REAL)
def argsort(x: jax.Array, dim: int = -1, descending: bool = False) -> jax.Array:
    return sort(x, dim, descending)[1]


@OPS.op(aten.argsort.stable, check=check_dim, dtypes=REAL)
def argsort_stable(x: jax.Array, *, stable: bool, dim: int = -1, descending: bool = False) -> jax.Array:
    return sort(x, dim, descending)[1]


@OPS.op(aten.msort.default, dtypes=REAL)
def msort(x: jax.Array) -> jax.Array:
    return sort(x, 0)[0]


@OPS.op(aten.topk.default, dtypes=REAL_NUMBERS, pad=sort_and_scan_rules.topk, limits=TIES)
def topk(x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The result is always sorted; equal elements are in their order in `x`."""
    axis, row = axis_of(dim, x.ndim), as_vector(x)

    def by_sorting(row: jax.Array) -> Pair:
        values, places = sort_with_indices(row, axis, largest)
        return slice_axis(values, axis, 0, k), slice_axis(places, axis, 0, k)

    def by_rows(row: jax.Array) -> Pair:
        values, places = find_largest(jnp.moveaxis(row, axis, -1), k, descending=largest)
        return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)

    is_faster = has_keys(row) and 0 < _FEWEST_PER_LARGEST * k <= row.shape[axis]
    values, places = lax.platform_dependent(row, cpu=by_rows, default=by_sorting) if is_faster else by_sorting(row)
    return (values.reshape(()), places.reshape(())) if x.ndim == 0 and k == 1 else (values, places)


@OPS.op(aten.kthvalue.default, dtypes=REAL_NUMBERS, pad=sort_and_scan_rules.kth_value, limits=TIES)
def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    axis = axis_of(dim, x.ndim)
    return restore_shape(select_in_order(as_vector(x), axis, jnp.asarray(k - 1)), x, axis, keepdim)


def lower_median(x: jax.Array, dim: int, keepdim: bool, skip_nan: bool) -> Pair:
    """The lower median. It is NaN if the row has NaN, unless NaNs are skipped and the row has numbers."""
    axis = axis_of(dim, x.ndim)
    row = as_vector(x)
    size = row.shape[axis]
    middle = jnp.asarray((size - 1) // 2)
    if is_float(row):
        nans = jnp.sum(is_nan(row), axis, jnp.int64, keepdims=True)
        numbers = size - nans
        first_nan = jnp.minimum(numbers, size - 1)  # it follows the numbers
        middle = jnp.maximum(numbers - 1, 0) // 2 if skip_nan else jnp.where(nans > 0, first_nan, middle)
    return restore_shape(select_in_order(row, axis, middle), x, axis, keepdim)


@OPS.op(aten.median.dim, dtypes=REAL_NUMBERS, check=check_has_elements, pad=sort_and_scan_rules.median, limits=TIES)
def median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    return lower_median(x, dim, keepdim, skip_nan=False)


@OPS.op(aten.nanmedian.dim, dtypes=REAL_NUMBERS, check=check_has_elements, pad=sort_and_scan_rules.median, limits=TIES)
def nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    return lower_median(x, dim, keepdim, skip_nan=True)


@OPS.op(aten.median.default, dtypes=REAL_NUMBERS, pad=sort_and_scan_rules.median)
def median(x: jax.Array) -> jax.Array:
    return _whole_median(x, skip_nan=False)


@OPS.op(aten.nanmedian.default, dtypes=REAL_NUMBERS, pad=sort_and_scan_rules.median)
def nanmedian(x: jax.Array) -> jax.Array:
    return _whole_median(x, skip_nan=True)


def _whole_median(x: jax.Array, skip_nan: bool) -> jax.Array:
    if x.size == 0:  # torch's result: NaN, or the smallest integer, to which it converts NaN
        return jnp.asarray(jnp.nan if is_float(x) else np.iinfo(x.dtype).min, x.dtype)
    return lower_median(x.reshape(-1), 0, False, skip_nan)[0]


@OPS.op(
    aten.mode.default,
    check=check_has_elements,
    dtypes=REAL,
    limits="in a row with NaN torch's own answer depends on the order of the elements",
)
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent value (the smallest of several) and its last index.

    Each NaN is a separate value; torch's result for rows with NaN depends on the order and may differ.
    """
    axis = axis_of(dim, x.ndim)
    values, places = sort_with_indices(as_vector(x), axis, False)
    steps = lax.broadcasted_iota(jnp.int64, values.shape, axis)
    size = values.shape[axis]
    changed = slice_axis(values, axis, 1, size) != slice_axis(values, axis, 0, size - 1)
    first = jnp.zeros_like(slice_axis(changed, axis, 0, 1)) if size > 1 else jnp.zeros(values.shape, bool)
    starts = jnp.concatenate([first, changed], axis) if size > 1 else first
    run_start = lax.cummax(jnp.where(starts, steps, 0), axis)
    longest = jnp.argmax(steps - run_start, axis, keepdims=True)
    return restore_shape((take_along(values, longest, axis), take_along(places, longest, axis)), x, axis, keepdim)


def place_of_extreme(x: jax.Array, axis: int, *, largest: bool) -> jax.Array:
    """The index along an axis, which is kept, of the first extreme, or of the first NaN."""

    def of_equals(x: jax.Array) -> jax.Array:
        # XLA's loop over pairs of elements and places takes the CPU ten times as long as two reductions. These read the same
        # elements: computed once for each of them, they might be rounded apart, and none would be the largest.
        x = lax.optimization_barrier(x)
        is_extreme = (x == (amax if largest else amin)(x, [axis], True)) | is_nan(x)
        steps = lax.broadcasted_iota(_places_dtype(x.shape[axis]), x.shape, axis)
        return jnp.min(jnp.where(is_extreme, steps, x.shape[axis]), axis, keepdims=True).astype(jnp.int64)

    def of_pairs(x: jax.Array) -> jax.Array:
        return (jnp.argmax if largest else jnp.argmin)(x, axis, keepdims=True).astype(jnp.int64)

    places: jax.Array = lax.platform_dependent(x, cpu=of_equals, default=of_pairs)
    return places


def _arg_extreme(x: jax.Array, dim: int | None, keepdim: bool, largest: bool) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), jnp.int64)
    if dim is None:
        found = _place_in_all(x, largest)
        return found.reshape((1,) * x.ndim) if keepdim else found.reshape(())
    axis = axis_of(dim, x.ndim)
    places = place_of_extreme(x, axis, largest=largest)
    return places if keepdim else lax.squeeze(places, (axis,))


def _place_in_all(x: jax.Array, largest: bool) -> jax.Array:
    """The index [1] into the flattened `x`: that in the first best row, of the first of its best elements."""
    rows = x.reshape(-1, x.shape[-1])
    places = place_of_extreme(rows, 1, largest=largest)
    row = place_of_extreme(take_along(rows, places, 1)[:, 0], 0, largest=largest)
    return row * rows.shape[1] + take_along(places[:, 0], row, 0)


_PAIRS = "a reduction of pairs of elements and places, which the CPU computes in ten times the time"
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_PLACES_OF_SIGNED = Finding(Verdict.SLOWER, _SIGNED, _PAIRS, frozenset({"cpu"}))
_EXTREMES = Finding(Verdict.SLOWER, _SIGNED | {torch.float16}, _PAIRS, frozenset({"cpu"}))


@OPS.op(aten.argmax.default, dtypes=REAL_NUMBERS, pad=reductions_rules.reduction, torch_mlir=(_PLACES_OF_SIGNED,))
def argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """The index of the first largest element, or of the first NaN."""
    return _arg_extreme(x, dim, keepdim, largest=True)


@OPS.op(aten.argmin.default, dtypes=REAL_NUMBERS, pad=reductions_rules.reduction, torch_mlir=(_PLACES_OF_SIGNED,))
def argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """The index of the first smallest element, or of the first NaN."""
    return _arg_extreme(x, dim, keepdim, largest=False)


def _extreme_with_place(x: jax.Array, dim: int, keepdim: bool, largest: bool) -> Pair:
    axis = axis_of(dim, x.ndim)
    row = as_vector(x)
    places = _arg_extreme(row, axis, True, largest)
    return restore_shape((take_along(row, places, axis), places), x, axis, keepdim)


_extreme_of_axis = partial(
    OPS.op, check=check_has_elements, dtypes=REAL, pad=reductions_rules.reduction, torch_mlir=(_EXTREMES,)
)


@_extreme_of_axis(aten.max.dim)
def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    return _extreme_with_place(x, dim, keepdim, largest=True)


@_extreme_of_axis(aten.min.dim)
def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    return _extreme_with_place(x, dim, keepdim, largest=False)


@OPS.op(aten.aminmax.default, dtypes=REAL, pad=reductions_rules.both_extremes)
def aminmax(x: jax.Array, *, dim: int | None = None, keepdim: bool = False) -> Pair:
    dims = () if dim is None else dim
    return amin(x, dims, keepdim), amax(x, dims, keepdim)


@OPS.op(aten._aminmax.default, dtypes=REAL, pad=reductions_rules.both_extremes)
def aminmax_whole(x: jax.Array) -> Pair:
    return aminmax(x)


@OPS.op(aten._aminmax.dim, dtypes=REAL, pad=reductions_rules.both_extremes)
def aminmax_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    return aminmax(x, dim=dim, keepdim=keepdim)
