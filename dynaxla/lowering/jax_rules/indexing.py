"""Reading and masking by index.

torch raises for an index out of range. No program that XLA compiles can: here such a read gives some element of the
tensor, and such a write is dropped. An index that torch would count from the end is counted from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.lowering.jax_rules.axes_and_dtypes import Scalar, as_vector, axis_of, constant
from dynaxla.lowering.jax_rules.promotion import torch_dtype
from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES, RuleSet

aten = torch.ops.aten
RULES = RuleSet()

Indices = Sequence[jax.Array | None]


def as_subscript(indices: Indices) -> tuple[jax.Array | slice, ...]:
    """A torch index list as a subscript of an array: None means the whole axis."""
    return tuple(slice(None) if index is None else index for index in indices)


def along(axis: int, index: jax.Array) -> tuple[jax.Array | slice, ...]:
    """The subscript that takes `index` on one axis and all of the axes before and after it."""
    return (slice(None),) * axis + (index,)


@RULES.rule(aten.gather.default)
def gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    axis = axis_of(dim, x.ndim)
    source, where = as_vector(x), as_vector(index)
    ends = [n if a == axis else where.shape[a] for a, n in enumerate(source.shape)]
    window = lax.slice(source, [0] * source.ndim, ends)
    return jnp.take_along_axis(window, where, axis, mode="promise_in_bounds").reshape(index.shape)


@RULES.rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: jax.Array, indices: Indices) -> jax.Array:
    return x.at[as_subscript(indices)].get(mode="promise_in_bounds")


def clamped(x: jax.Array, indices: Indices) -> list[jax.Array | None]:
    """Each index brought inside its axis, from -size to size - 1, as the masked index ops promise."""
    return [i if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


@RULES.rule(aten._unsafe_masked_index.default)
def masked_index(x: jax.Array, mask: jax.Array, indices: Indices, fill: Scalar) -> jax.Array:
    if x.size == 0:  # nothing can be read, but the result may have elements: all of them are `fill`
        x = jnp.zeros([max(n, 1) for n in x.shape], x.dtype)
        mask = jnp.zeros_like(mask)
    taken = index(x, clamped(x, indices))
    return jnp.where(mask, taken, constant(fill, x.dtype))


@RULES.rule(aten.index_select.default)
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.ndim == 0:
        return x
    where = along(axis_of(dim, x.ndim), as_vector(index))
    return x.at[where].get(mode="promise_in_bounds")


@RULES.rule(aten.take.default)
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    return x.reshape(-1).at[index].get(mode="promise_in_bounds")


@RULES.rule(aten.masked_fill.Scalar)
def masked_fill_scalar(x: jax.Array, mask: jax.Array, value: Scalar) -> jax.Array:
    return jnp.where(mask, constant(value, x.dtype), x)


@RULES.rule(aten.masked_fill.Tensor)
def masked_fill_tensor(x: jax.Array, mask: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(mask, value.astype(x.dtype), x)


@RULES.rule(aten.masked_scatter.default)
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The true places of `mask`, in order, take the elements of `source`; torch raises if there are too few."""
    base, chosen = jnp.broadcast_arrays(x, mask.astype(bool))
    if source.size == 0 or base.size == 0:
        return base
    rank = jnp.cumsum(chosen.reshape(-1), dtype=jnp.int64) - 1
    values = source.reshape(-1).at[jnp.maximum(rank, 0)].get(mode="promise_in_bounds")
    return jnp.where(chosen, values.reshape(base.shape), base)


@RULES.rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The elements of the gradient at the true places of `mask`, in order, and zeros behind them."""
    grads, chosen = (x.reshape(-1) for x in jnp.broadcast_arrays(grad_output, mask.astype(bool)))
    count = math.prod(sizes)
    places = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int64) - 1, count)
    return jnp.zeros(count, grads.dtype).at[places].set(grads, mode="drop").reshape(tuple(sizes))


@RULES.rule(aten.nonzero_static.default)
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if x.size == 0:  # for which jnp.nonzero forgets the fill value
        return jnp.full((size, x.ndim), fill_value, jnp.int64)
    found = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(found, axis=1).astype(jnp.int64)


def insertion_points(sorted_values: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    """Where `values` go in `sorted_values` (one row, or as many rows as `values`), found by halving as torch does.

    NaN goes to the end. Returns int64 of the shape of `values`.
    """
    count = sorted_values.shape[-1]
    low, high = jnp.zeros(values.shape, jnp.int64), jnp.full(values.shape, count, jnp.int64)
    for _ in range(count.bit_length()):
        middle = jnp.minimum((low + high) // 2, count - 1)
        if sorted_values.ndim == 1:
            probe = sorted_values.at[middle].get(mode="promise_in_bounds")
        else:
            probe = jnp.take_along_axis(sorted_values, middle, -1, mode="promise_in_bounds")
        goes_on = ~((probe > values) if right else (probe >= values))
        active = low < high
        low, high = jnp.where(active & goes_on, middle + 1, low), jnp.where(active & ~goes_on, middle, high)
    return low


@RULES.rule(aten.searchsorted.Tensor)
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
    both = JNP_DTYPES[torch.promote_types(torch_dtype(rows), torch_dtype(x))]
    found = insertion_points(rows.astype(both), x.astype(both), right or side == "right")
    return found.astype(jnp.int32) if out_int32 else found


@RULES.rule(aten.searchsorted.Scalar)
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


@RULES.rule(aten.bucketize.Tensor)
def bucketize(x: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@RULES.rule(aten.bucketize.Scalar)
def bucketize_scalar(x: Scalar, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    return searchsorted_scalar(boundaries, x, out_int32=out_int32, right=right)


@RULES.rule(aten.histc.default)
def histc(x: jax.Array, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> jax.Array:
    """torch raises when the range is taken from data that holds an infinity or NaN; here the counts are then zero."""
    flat = x.reshape(-1)
    low, high = constant(min, x.dtype), constant(max, x.dtype)
    if min == max and flat.size:
        low, high = jnp.min(flat), jnp.max(flat)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (flat >= low) & (flat <= high)
    place = jnp.where(inside, (flat - low) * bins / (high - low), 0).astype(jnp.int64)
    counts = jnp.zeros(bins, jnp.int64).at[jnp.minimum(place, bins - 1)].add(inside.astype(jnp.int64))
    return counts.astype(x.dtype)


@RULES.rule(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    """`output_size` is the sum of `repeats`: without it the size of the result is in the data."""
    if output_size is None:
        raise ValueError("repeat_interleave needs output_size")
    ends = jnp.cumsum(repeats, dtype=jnp.int64)
    return insertion_points(ends, jnp.arange(output_size, dtype=jnp.int64), right=True).astype(repeats.dtype)


@RULES.rule(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **_: object) -> jax.Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col))).astype(JNP_DTYPES[dtype])


@RULES.rule(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **_: object) -> jax.Array:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col))).astype(JNP_DTYPES[dtype])
