"""Fractional max pooling: windows of one size, whose starts depend on a random number per plane and dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from dynaxla.ops.adaptive_pooling import find_maximum
from dynaxla.ops.dtypes import WIDE_FLOATS
from dynaxla.ops.eager_errors import check_inexact
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def _window_starts(sample: jax.Array, size: int, count: int, kernel: int) -> jax.Array:
    """The starts of the windows along a dim, int64 [..., count]; the last window ends with the dim."""
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int64)
    if count == 1:
        return last
    step = jnp.asarray(size - kernel, sample.dtype) / jnp.asarray(count - 1, sample.dtype)
    turn = jnp.arange(count - 1, dtype=sample.dtype) + sample[..., None]
    begins = (turn * step).astype(jnp.int64) - (sample[..., None] * step).astype(jnp.int64)
    return jnp.concatenate([begins, last], -1)


def _pool(
    x: jax.Array, kernel: Sequence[int], output_size: Sequence[int], samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The maxima and their flat indices in the plane; `samples` [..., dims] has the random numbers of each plane."""
    dims = len(kernel)
    sizes, batch = x.shape[-dims:], x.shape[:-dims]
    samples = samples.reshape(*batch, dims)
    places = jnp.zeros((*batch, *[1] * (2 * dims)), jnp.int64)  # one index per window and element in it
    for dim, (size, count, width) in enumerate(zip(sizes, output_size, kernel, strict=True)):
        covered = _window_starts(samples[..., dim], size, count, width)[..., None] + jnp.arange(width)
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = count, width
        places = places * size + covered.reshape(*batch, *shape)
    flat_places = places.reshape(*batch, math.prod(output_size), math.prod(kernel))
    flat = x.reshape(*batch, 1, math.prod(sizes))
    values = jnp.take_along_axis(flat, flat_places, -1)
    chosen = find_maximum(values, values.ndim - 1)
    maxima, indices = (jnp.take_along_axis(y, chosen, -1) for y in (values, flat_places))
    return maxima.reshape(*batch, *output_size), indices.reshape(*batch, *output_size)


@OPS.op(aten.fractional_max_pool2d.default, check=check_inexact("self"), dtypes=WIDE_FLOATS | {torch.int64})
def fractional_max_pool2d(
    self: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # torch uses the first number for the width (in three dims the last)
    return _pool(self, _of_each(kernel_size, 2), _of_each(output_size, 2), random_samples[..., ::-1])


@OPS.op(aten.fractional_max_pool3d.default, check=check_inexact("self"), dtypes=WIDE_FLOATS | {torch.int64})
def fractional_max_pool3d(
    self: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _pool(self, _of_each(kernel_size, 3), _of_each(output_size, 3), random_samples)


def _of_each(sizes: Sequence[int], dims: int) -> Sequence[int]:
    return list(sizes) * dims if len(sizes) == 1 else sizes


@OPS.op(aten.fractional_max_pool2d_backward.default, dtypes=WIDE_FLOATS | {torch.int64})
def fractional_max_pool2d_backward(
    grad_output: jax.Array, self: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: jax.Array
) -> jax.Array:
    return _scatter(grad_output, indices, self.shape, 2)


@OPS.op(aten.fractional_max_pool3d_backward.default, dtypes=WIDE_FLOATS | {torch.int64})
def fractional_max_pool3d_backward(
    grad_output: jax.Array, self: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: jax.Array
) -> jax.Array:
    return _scatter(grad_output, indices, self.shape, 3)


def _scatter(gradient: jax.Array, places: jax.Array, shape: Sequence[int], dims: int) -> jax.Array:
    """Scatters the gradients to their indices in the plane; overlapping windows are added."""
    planes, plane, windows = math.prod(shape[:-dims]), math.prod(shape[-dims:]), math.prod(places.shape[-dims:])
    rows = jnp.arange(planes)[:, None]
    zeros = jnp.zeros((planes, plane), gradient.dtype)
    return zeros.at[rows, places.reshape(planes, windows)].add(gradient.reshape(planes, windows)).reshape(shape)
