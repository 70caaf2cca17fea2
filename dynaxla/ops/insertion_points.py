"""Binary search in sorted rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import sort_and_scan as sort_and_scan_rules
from dynaxla.custom_ops.search_rows import SEARCH_ROWS
from dynaxla.ops.axes_and_dtypes import Scalar, constant
from dynaxla.ops.dtypes import REAL, REAL_NUMBERS
from dynaxla.ops.eager_errors import check_rank
from dynaxla.ops.promotion import JNP_DTYPES, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def insertion_points(
    sorted_values: jax.Array, values: jax.Array, right: bool, count: jax.Array | None = None
) -> jax.Array:
    """The insertion points of `values` in `sorted_values` (one row, or as many rows as `values`), by binary search as in torch.

    NaN goes to the end. Returns int64 of the shape of `values`.

    Args:
        count: how many elements of each row are searched; None: all.
    """
    size = sorted_values.shape[-1]
    low, high = jnp.zeros(values.shape, jnp.int64), jnp.full(values.shape, size if count is None else count, jnp.int64)
    for _ in range(size.bit_length()):
        middle = jnp.minimum((low + high) // 2, size - 1)
        if sorted_values.ndim == 1:
            probe = sorted_values.at[middle].get(mode="promise_in_bounds")
        else:
            probe = jnp.take_along_axis(sorted_values, middle, -1, mode="promise_in_bounds")
        goes_on = ~((probe > values) if right else (probe >= values))
        active = low < high
        low, high = jnp.where(active & goes_on, middle + 1, low), jnp.where(active & ~goes_on, middle, high)
    return low


@OPS.op(aten.searchsorted.Tensor, dtypes=REAL_NUMBERS, pad=sort_and_scan_rules.search)
def searchsorted(
    sorted_sequence: jax.Array,
    x: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    rows = sorted_sequence
    if sorter is not None:
        rows = jnp.take_along_axis(rows, sorter, -1, mode="promise_in_bounds")
    return _search(rows, x, right or side == "right", out_int32)


@OPS.op(SEARCH_ROWS, dtypes=REAL_NUMBERS)
def search_rows(rows: jax.Array, x: jax.Array, count: jax.Array, right: bool, out_int32: bool) -> jax.Array:
    return _search(rows, x, right, out_int32, count)


def _search(rows: jax.Array, x: jax.Array, right: bool, out_int32: bool, count: jax.Array | None = None) -> jax.Array:
    both = JNP_DTYPES[torch.promote_types(torch_dtype(rows), torch_dtype(x))]
    found = insertion_points(rows.astype(both), x.astype(both), right, count)
    return found.astype(jnp.int32) if out_int32 else found


@OPS.op(aten.searchsorted.Scalar, dtypes=REAL)
def searchsorted_scalar(
    sorted_sequence: jax.Array,
    x: Scalar,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    dtype = torch.result_type(torch.empty(1, dtype=torch_dtype(sorted_sequence)), x)
    value = constant(x, JNP_DTYPES[dtype])
    return searchsorted(sorted_sequence, value, out_int32=out_int32, right=right, side=side, sorter=sorter)


@OPS.op(aten.bucketize.Tensor, dtypes=REAL_NUMBERS, check=check_rank("boundaries", 1), pad=sort_and_scan_rules.search)
def bucketize(x: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@OPS.op(aten.bucketize.Scalar, dtypes=REAL, check=check_rank("boundaries", 1))
def bucketize_scalar(x: Scalar, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    return searchsorted_scalar(boundaries, x, out_int32=out_int32, right=right)
