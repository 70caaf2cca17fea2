"""How torch counts axes and picks dtypes, where JAX does it another way; the bodies that move data share it."""

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
    """The axis, from 0, that `dim` names; torch lets a scalar be asked for its axis 0 or -1."""
    return dim % max(rank, 1)


def axes_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The axes a reduction runs over: None and an empty list mean all of them, and a scalar has none."""
    if rank == 0:
        return ()
    if dims is None:
        return tuple(range(rank))
    named = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % rank for d in named)) if named else tuple(range(rank))


def as_vector(x: jax.Array) -> jax.Array:
    """A scalar as a vector of one element; everything else as it is."""
    return x.reshape(1) if x.ndim == 0 else x


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """`start:end` on an axis of `size`, wrapped and clamped as Python and torch do; end is never before start."""
    first = 0 if start is None else start
    last = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    last = min(max(last + size if last < 0 else last, 0), size)
    return first, max(first, last)


def slice_axis(x: jax.Array, axis: int, start: int, end: int, step: int = 1) -> jax.Array:
    """`x[..., start:end:step, ...]` on one axis; the bounds are already inside it."""
    return lax.slice_in_dim(x, start, end, step, axis)


def is_float(x: jax.Array) -> bool:
    """Whether NaN exists in the dtype of `x` (real floating types only)."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_complex(x: jax.Array) -> bool:
    """Whether `x` is complex."""
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def widened(x: jax.Array) -> jax.Array:
    """float16 and bfloat16 as float32, in which torch accumulates them; other dtypes as they are."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def constant(value: Scalar, dtype: np.dtype | type) -> jax.Array:
    """A Python number as a scalar array, converted as C does (it wraps and truncates) where JAX would refuse."""
    if isinstance(value, float) and not math.isfinite(value) and jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{value} has no integer value")
    return jnp.asarray(np.asarray(value).astype(dtype))


def default_dtype(value: Scalar) -> torch.dtype:
    """The dtype torch infers for a Python number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    if isinstance(value, complex):
        return torch.promote_types(torch.get_default_dtype(), torch.complex32).to_complex()
    return torch.get_default_dtype()


def lowest(dtype: np.dtype) -> jax.Array:
    """The identity of max in `dtype`."""
    return _extreme(dtype, -1)


def highest(dtype: np.dtype) -> jax.Array:
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
    """int64 of shape `size`: where each element of a strided view lies in flat storage."""
    positions = jnp.full(tuple(size), offset or 0, jnp.int64)
    for axis, step in enumerate(stride):
        positions = positions + step * lax.broadcasted_iota(jnp.int64, tuple(size), axis)
    return positions
