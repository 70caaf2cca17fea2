"""Sorts by keys: whole numbers that hold an element and its place, which XLA's CPU compiler sorts fast.

XLA's CPU client sorts one operand of integers in a tenth of the time of a pair of elements and places, which it also compares
by a slower order where the elements are floats. `python -m benchmarks.sort_speed` measures both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_PLACES = 32
"""Bits of a key that hold the place."""

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
"""The bits of float32's infinity, and of a NaN."""


def has_keys(x: jax.Array) -> bool:
    """Whether a key of 64 bits can hold an element of x and any place."""
    return (
        x.dtype.itemsize <= 4
        and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        and max(x.shape, default=0) < 1 << _PLACES
    )


def sort_by_keys(x: jax.Array, axis: int, *, descending: bool) -> tuple[jax.Array, jax.Array]:
    """The elements of x in order along an axis, and their places as int64. Equal elements stay in order, also if descending.

    NaN is larger than every number, whatever its sign, and zeros are equal.
    """
    order = order_of(x)
    keys = ((~order if descending else order) << _PLACES) | lax.broadcasted_iota(jnp.int64, x.shape, axis)
    places = lax.sort(keys, dimension=axis, is_stable=False) & ((1 << _PLACES) - 1)
    return jnp.take_along_axis(x, places, axis, mode="promise_in_bounds"), places


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


def find_largest(x: jax.Array, count: int, *, descending: bool) -> tuple[jax.Array, jax.Array]:
    """The first `count` elements of each row of x [..., n], as `sort_by_keys` orders them, and their places.

    XLA's CPU client does not sort for it where count < n.
    """
    order = order_of(x)
    order = order if descending else ~order
    bits = jnp.where(order < 0, order ^ 0x7FFFFFFF, order).astype(jnp.int32)
    rows = lax.bitcast_convert_type(bits, jnp.float32).reshape(-1, x.shape[-1])
    places = lax.top_k(rows, count)[1].reshape(*x.shape[:-1], count).astype(jnp.int64)
    return jnp.take_along_axis(x, places, -1, mode="promise_in_bounds"), places
