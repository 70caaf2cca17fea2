"""Adaptive pooling: window bounds follow from the input and output sizes."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import adaptive_pooling as adaptive_pooling_rules
from dynaxla.bucketing.pad_rules import image_gradients as image_gradients_rules
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import is_nan
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.eager_errors import check_inexact
from dynaxla.ops.ordering import place_of_extreme, take_along
from dynaxla.ops.pooling import linear_gradient, lowest_of
from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.torch_api.symbols import example

aten = torch.ops.aten
OPS = OpFamily()


def _check_has_pixels(node: Node) -> str | None:
    dims = len(argument(node, "output_size"))
    return "no elements" if any(example(size) == 0 for size in tensor_of(node, "self").shape[-dims:]) else None


_averages = partial(OPS.op, dtypes=FLOATS, check=_check_has_pixels, pad=adaptive_pooling_rules.adaptive_pool)


@_averages(aten._adaptive_avg_pool2d.default, as_aten=decompose)
@_averages(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x: Array, output_size: list[int]) -> Array:
    """The mean of each window, axis by axis."""
    wide = cast(x, opmath_dtype(torch_dtype(x)))
    for axis, size in zip(range(x.ndim - len(output_size), x.ndim), output_size, strict=True):
        wide = _mean_of_parts(wide, axis, size)
    return wide.astype(x.dtype)


@OPS.op(aten._adaptive_avg_pool2d_backward.default, dtypes=FLOATS, pad=image_gradients_rules.adaptive_pool_backward)
def adaptive_avg_pool2d_backward(grad_output: Array, x: Array) -> Array:
    return linear_gradient(lambda y: adaptive_avg_pool(y, list(grad_output.shape[-2:])), grad_output, x)


@OPS.op(aten._adaptive_avg_pool3d_backward.default, dtypes=FLOATS, pad=image_gradients_rules.adaptive_pool_backward)
def adaptive_avg_pool3d_backward(grad_output: Array, x: Array) -> Array:
    return linear_gradient(lambda y: adaptive_avg_pool(y, list(grad_output.shape[-3:])), grad_output, x)


@OPS.op(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    check=check_inexact("self"),
    dtypes=FLOATS | {torch.int64},
    pad=adaptive_pooling_rules.adaptive_pool,
)
def adaptive_max_pool(x: Array, output_size: list[int]) -> tuple[Array, Array]:
    """The largest value of each window and its flat index in the image: that of the first of equal values, of the last NaN."""
    dims = len(output_size)
    values = x
    places = jnp.arange(math.prod(x.shape[-dims:]), dtype=jnp.int64).reshape(x.shape[-dims:])
    places = jnp.broadcast_to(places, x.shape)
    # The last axis first, so that the first of equal values in row-major order is chosen.
    for axis, size in reversed(list(zip(range(x.ndim - dims, x.ndim), output_size, strict=True))):
        values, places = _highest_of_parts(values, places, axis, size)
    return values, places


def _parts(n: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` windows of an axis: its positions [size, longest], and whether each belongs to the window."""
    starts = np.arange(size) * n // size
    ends = -(-((np.arange(size) + 1) * n) // size)
    longest = int((ends - starts).max()) if size else 0
    positions = starts[:, None] + np.arange(longest)
    return np.minimum(positions, n - 1), positions < ends[:, None]


def _mean_of_parts(x: Array, axis: int, size: int) -> Array:
    n = x.shape[axis]
    if size and n % size == 0:
        return jnp.mean(x.reshape(*x.shape[:axis], size, n // size, *x.shape[axis + 1 :]), axis + 1)
    positions, own = _parts(n, size)
    taken = jnp.take(x, positions, axis=axis)
    own_shape = (*own.shape, *[1] * (x.ndim - axis - 1))
    total = jnp.sum(jnp.where(own.reshape(own_shape), taken, 0), axis + 1)
    counts = own.sum(1).reshape(size, *[1] * (x.ndim - axis - 1))
    return total / jnp.asarray(counts, x.dtype)


def find_maximum(values: Array, axis: int) -> Array:
    """The index along an axis, which is kept, of the last NaN or, without NaN, of the first of the largest values."""
    steps = lax.broadcasted_iota(jnp.int64, values.shape, axis)
    last_nan = jnp.max(jnp.where(is_nan(values), steps, -1), axis, keepdims=True)
    return jnp.where(last_nan < 0, place_of_extreme(values, axis, largest=True), last_nan)


def _highest_of_parts(values: Array, places: Array, axis: int, size: int) -> tuple[Array, Array]:
    n = values.shape[axis]
    if size and n % size == 0:
        own_axes = (*values.shape[:axis], size, n // size, *values.shape[axis + 1 :])
        values, places = values.reshape(own_axes), places.reshape(own_axes)
    else:
        positions, own = _parts(n, size)
        own = own.reshape(*own.shape, *[1] * (values.ndim - axis - 1))
        values = jnp.where(own, jnp.take(values, positions, axis=axis), lowest_of(values))
        places = jnp.take(places, positions, axis=axis)
    best = find_maximum(values, axis + 1)
    return take_along(values, best, axis + 1).squeeze(axis + 1), take_along(places, best, axis + 1).squeeze(axis + 1)
