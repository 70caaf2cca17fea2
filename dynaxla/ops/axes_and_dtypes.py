"""Helpers of the bodies for axes, slices and dtypes, where torch's rules differ from JAX's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

Scalar = bool | int | float | complex


def axis_of(dim: int, rank: int) -> int:
    """`dim` as a non-negative axis; for a 0-d tensor torch accepts 0 and -1."""
    return dim % max(rank, 1)


def axes_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The axes of a reduction: None and an empty list mean all axes; a 0-d tensor has none."""
    if rank == 0:
        return ()
    if dims is None:
        return tuple(range(rank))
    named = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % rank for d in named)) if named else tuple(range(rank))


def as_vector(x: jax.Array) -> jax.Array:
    """Reshapes a 0-d array to one element; returns other arrays unchanged."""
    return x.reshape(1) if x.ndim == 0 else x


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """`start:end` on an axis of `size`, wrapped and clamped as in Python and torch; end is never before start."""
    first = 0 if start is None else start
    last = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    last = min(max(last + size if last < 0 else last, 0), size)
    return first, max(first, last)


def slice_axis(x: jax.Array, axis: int, start: int, end: int, step: int = 1) -> jax.Array:
    """`x[..., start:end:step, ...]` on one axis; the bounds are within the axis."""
    return lax.slice_in_dim(x, start, end, step, axis)


def is_float(x: jax.Array) -> bool:
    """Whether NaN exists in the dtype of `x` (real floating types only)."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_nan(x: jax.Array) -> jax.Array:
    """Where `x` is NaN, which no number of another dtype than a real float is."""
    return jnp.isnan(x) if is_float(x) else jnp.zeros(x.shape, bool)


def is_complex(x: jax.Array) -> bool:
    """Whether `x` is complex."""
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def widen(x: jax.Array) -> jax.Array:
    """Casts float16 and bfloat16 to float32, in which torch accumulates them; returns other dtypes unchanged."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def constant(value: Scalar, dtype: np.dtype | type) -> jax.Array:
    """Converts a Python number to a 0-d array as C does (it wraps and truncates); JAX would refuse some."""
    if isinstance(value, float) and not math.isfinite(value) and jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{value} has no integer value")
    return jnp.asarray(np.asarray(value).astype(dtype))


def default_dtype(value: Scalar) -> torch.dtype:
    """The dtype that torch infers for a Python number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    if isinstance(value, complex):
        return torch.promote_types(torch.get_default_dtype(), torch.complex32).to_complex()
    return torch.get_default_dtype()


def lowest_value(dtype: np.dtype) -> jax.Array:
    """The identity of max in `dtype`."""
    return _extreme(dtype, -1)


def highest_value(dtype: np.dtype) -> jax.Array:
    """The identity of min in `dtype`."""
    return _extreme(dtype, 1)


def _extreme(dtype: np.dtype, sign: int) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(sign * math.inf, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(sign > 0)
    info = np.iinfo(dtype)
    return jnp.asarray(info.max if sign > 0 else info.min, dtype)


def strided_positions(size: Sequence[int], stride: Sequence[int], offset: int | None) -> jax.Array:
    """The storage index of each element of a strided view, int64 of shape `size`."""
    positions = jnp.full(tuple(size), offset or 0, jnp.int64)
    for axis, step in enumerate(stride):
        positions = positions + step * lax.broadcasted_iota(jnp.int64, tuple(size), axis)
    return positions
