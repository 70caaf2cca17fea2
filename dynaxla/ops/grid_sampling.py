"""Sampling of an image or a volume at the positions of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import grid_sampling as grid_sampling_rules
from dynaxla.custom_ops import internal
from dynaxla.ops.axes_and_dtypes import widen
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

LINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2

Pair = tuple[jax.Array, jax.Array]
Size = int | jax.Array
"""The size of an axis: an int, or a 0-d array of the positions' dtype if the image is padded."""


def to_pixels(coordinate: jax.Array, size: Size, align_corners: bool) -> jax.Array:
    """Converts coordinates from -1 to 1 to positions on an axis of `size`."""
    if align_corners:
        return (coordinate + 1) * ((size - 1) / 2)
    return (coordinate + 1) * (size / 2) - 0.5


def clip_with_slope(position: jax.Array, size: Size) -> Pair:
    """The position clipped to the axis, and the derivative: 0 at and outside of the border. NaN becomes 0."""
    inside = (position > 0) & (position < size - 1)
    clipped = jnp.where(position > 0, jnp.minimum(position, size - 1), jnp.zeros_like(position))
    return clipped, inside.astype(position.dtype)


def reflect_with_slope(position: jax.Array, twice_low: int, twice_high: Size) -> Pair:
    """The position reflected at both bounds into their range, and the derivative; 0 if the range is empty."""
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    is_point = span == 0
    span = jnp.where(is_point, jnp.ones_like(position), span)
    distance = position - low
    slope = jnp.where(distance < 0, -1, 1).astype(position.dtype)
    distance = jnp.abs(distance)
    extra, flips = jnp.fmod(distance, span), jnp.floor(distance / span)
    even = jnp.fmod(flips, 2) == 0
    zeros = jnp.zeros_like(position)
    reflected = jnp.where(even, extra + low, span - extra + low)
    return jnp.where(is_point, zeros, reflected), jnp.where(is_point, zeros, jnp.where(even, slope, -slope))


def apply_padding_mode(position: jax.Array, size: Size, padding_mode: int, align_corners: bool) -> Pair:
    """The position after padding, and its derivative."""
    if padding_mode == ZEROS:
        return position, jnp.ones_like(position)
    if padding_mode == BORDER:
        return clip_with_slope(position, size)
    bounds = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
    reflected, slope = reflect_with_slope(position, *bounds)
    clipped, slope_of_clip = clip_with_slope(reflected, size)
    return clipped, slope * slope_of_clip


def read(x: jax.Array, sizes: Sequence[Size], places: Sequence[jax.Array]) -> jax.Array:
    """Reads `x[n, :, places...]` for each position of batch n; zero if a position (an integral float) is outside.

    Args:
        x: (N, C, ...), whose front, of the sizes `sizes`, is the image.
        places: the positions (N, P) on each axis after the first two.
    """
    inside = jnp.ones(places[0].shape, bool)
    flat = jnp.zeros(places[0].shape, jnp.int64)
    for count, size, place in zip(x.shape[2:], sizes, places, strict=True):
        fits = (place >= 0) & (place <= size - 1)
        flat = flat * count + jnp.where(fits, place, jnp.zeros_like(place)).astype(jnp.int64)
        inside = inside & fits
    rows = jax.lax.collapse(x, 2)
    taken = jax.vmap(lambda row, index: row.at[:, index].get(mode="promise_in_bounds"))(rows, flat)
    return jnp.where(inside[:, None], taken, jnp.zeros((), x.dtype))


def weighted_sum(
    x: jax.Array, sizes: Sequence[Size], places: Sequence[Sequence[jax.Array]], weights: Sequence[jax.Array]
) -> jax.Array:
    """The sum of `read` of each entry of `places` times its (N, P) weight; one gather for all entries."""
    at_once = [jnp.concatenate(parts, axis=1) for parts in zip(*places, strict=True)]
    taken = read(x, sizes, at_once).reshape(*x.shape[:2], len(places), places[0][0].shape[1])
    total = taken[:, :, 0] * weights[0][:, None]
    for entry in range(1, len(places)):
        total = total + taken[:, :, entry] * weights[entry][:, None]
    return total


def sample_linear(x: jax.Array, sizes: Sequence[Size], positions: Sequence[jax.Array]) -> jax.Array:
    floors = [jax.lax.stop_gradient(jnp.floor(p)) for p in positions]
    places, weights = [], []
    for corner in product((0, 1), repeat=len(positions)):
        weight = jnp.ones((), x.dtype)
        for side, position, floor in zip(corner, positions, floors, strict=True):
            weight = weight * (position - floor if side else floor + 1 - position)
        weights.append(weight)
        places.append([floor + side for side, floor in zip(corner, floors, strict=True)])
    return weighted_sum(x, sizes, places, weights)


def sample_nearest(x: jax.Array, sizes: Sequence[Size], positions: Sequence[jax.Array]) -> jax.Array:
    return read(x, sizes, [jnp.round(p) for p in positions])


def cubic_weights(t: jax.Array) -> list[jax.Array]:
    """Weights (a = -0.75) of the four elements around a position at distance `t` after the second."""
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def sample_cubic(
    x: jax.Array, sizes: Sequence[Size], positions: Sequence[jax.Array], padding_mode: int, align_corners: bool
) -> jax.Array:
    """Cubic sampling; each of the sixteen elements is padded separately."""
    floors = [jax.lax.stop_gradient(jnp.floor(p)) for p in positions]
    rows, columns = (cubic_weights(p - f) for p, f in zip(positions, floors, strict=True))

    def place(axis: int, step: int) -> jax.Array:
        moved = floors[axis] + (step - 1)
        inside, _ = apply_padding_mode(moved, sizes[axis], padding_mode, align_corners)
        return jnp.trunc(inside)  # a reflected integer is integral except for rounding

    steps = list(product(range(4), repeat=2))
    places = [[place(0, i), place(1, j)] for i, j in steps]
    return weighted_sum(x, sizes, places, [rows[i] * columns[j] for i, j in steps])


def sampler(
    sizes: Sequence[Size], mode: int, padding_mode: int, align_corners: bool
) -> Callable[[jax.Array, Sequence[jax.Array]], jax.Array]:
    """Returns the function of image and positions that samples in this mode."""
    if mode == CUBIC:
        return lambda x, positions: sample_cubic(x, sizes, positions, padding_mode, align_corners)
    sample = sample_linear if mode == LINEAR else sample_nearest
    return lambda x, positions: sample(x, sizes, positions)


def positions_of(
    grid: jax.Array, sizes: Sequence[Size], mode: int, padding_mode: int, align_corners: bool
) -> tuple[list[jax.Array], list[jax.Array]]:
    """For each axis of the image, (N, P): positions, and their derivatives by the grid, which lists the last axis first."""
    flat = jax.lax.collapse(grid, 1, grid.ndim - 1)
    positions, slopes = [], []
    for axis, size in enumerate(sizes):
        position = to_pixels(flat[..., len(sizes) - 1 - axis], size, align_corners)
        slope = jnp.full_like(position, (size - 1 if align_corners else size) / 2)
        if mode != CUBIC:
            position, slope_of_padding = apply_padding_mode(position, size, padding_mode, align_corners)
            slope = slope * slope_of_padding
        positions.append(position)
        slopes.append(slope)
    return positions, slopes


@OPS.op(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    dtypes=FLOATS,
    pad=grid_sampling_rules.sample,
    limits="halfway between two elements nearest takes either; no reflection of floats too large for a fraction",
)
def grid_sampler(x: jax.Array, grid: jax.Array, *settings: *tuple[int, int, bool]) -> jax.Array:
    """The modes are torch's numbers of interpolation and padding."""
    return _sampled(x, grid, x.shape[2:], *settings)


@OPS.op(internal.SAMPLE_GRID)
def sample_grid(x: jax.Array, grid: jax.Array, sizes: jax.Array, *settings: *tuple[int, int, bool]) -> jax.Array:
    return _sampled(x, grid, _true_sizes(sizes, grid), *settings)


def _true_sizes(sizes: jax.Array, grid: jax.Array) -> list[Size]:
    return list(sizes.astype(widen(grid).dtype))


def _sampled(
    x: jax.Array, grid: jax.Array, sizes: Sequence[Size], mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    positions, _ = positions_of(widen(grid), sizes, mode, padding_mode, align_corners)
    sampled = sampler(sizes, mode, padding_mode, align_corners)(widen(x), positions)
    return sampled.reshape(x.shape[0], x.shape[1], *grid.shape[1:-1]).astype(x.dtype)


@OPS.op(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    pad=grid_sampling_rules.sample_backward,
)
def grid_sampler_backward(
    grad: jax.Array,
    x: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    settings = (interpolation_mode, padding_mode, align_corners)
    by_image, by_grid = _sampled_back(grad, x, grid, x.shape[2:], *settings)
    return by_image if output_mask[0] else None, by_grid


@OPS.op(internal.SAMPLE_GRID_BACKWARD)
def sample_grid_backward(
    grad: jax.Array, x: jax.Array, grid: jax.Array, sizes: jax.Array, *settings: *tuple[int, int, bool]
) -> Pair:
    return _sampled_back(grad, x, grid, _true_sizes(sizes, grid), *settings)


def _sampled_back(
    grad: jax.Array,
    x: jax.Array,
    grid: jax.Array,
    sizes: Sequence[Size],
    mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Pair:
    positions, slopes = positions_of(widen(grid), sizes, mode, padding_mode, align_corners)
    _, pull_back = jax.vjp(sampler(sizes, mode, padding_mode, align_corners), widen(x), positions)
    by_image, by_position = pull_back(jax.lax.collapse(widen(grad), 2))
    by_grid = jnp.stack([g * slope for g, slope in zip(by_position, slopes, strict=True)][::-1], axis=-1)
    return by_image.astype(x.dtype), by_grid.reshape(grid.shape).astype(grid.dtype)
