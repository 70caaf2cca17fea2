"""Sampling of an image or a volume at the positions of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import grid_sampling as grid_sampling_rules
from dynaxla.custom_ops import internal
from dynaxla.ops.axes_and_dtypes import widen
from dynaxla.ops.division import rem
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

LINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2

Pair = tuple[jax.Array, jax.Array]
Size = int | jax.Array
"""The size of an axis: an int, or a 0-d array of the positions' dtype if the image is padded."""
Corners = Iterable[tuple[Sequence[jax.Array], jax.Array]]
"""Elements around each position: their places on each axis, integral floats (N, P), and their weights (N, P)."""


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
    extra, flips = rem(distance, span), jnp.floor(distance / span)
    even = rem(flips, jnp.full_like(flips, 2)) == 0
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


def find_elements(shape: Sequence[int], sizes: Sequence[Size], places: Sequence[jax.Array]) -> Pair:
    """The index (N, P) into the flattened image of each position (an integral float), and whether it is inside.

    Args:
        shape: (N, C, ...), of an array whose front, of the sizes `sizes`, is the image.
        places: the positions (N, P) on each axis after the first two.
    """
    inside = jnp.ones(places[0].shape, bool)
    flat = jnp.zeros(places[0].shape, jnp.int64)
    for count, size, place in zip(shape[2:], sizes, places, strict=True):
        fits = (place >= 0) & (place <= size - 1)
        flat = flat * count + jnp.where(fits, place, jnp.zeros_like(place)).astype(jnp.int64)
        inside = inside & fits
    return flat, inside


def weighted_sum(x: jax.Array, sizes: Sequence[Size], corners: Corners) -> jax.Array:
    """The sum (N, C, P) of the elements at the corners times their weights, as one loop; those outside are zero."""
    total = jnp.zeros((), x.dtype)
    for places, weight in corners:
        total = total + read(x, sizes, places) * weight[:, None]
    return total


def read(x: jax.Array, sizes: Sequence[Size], places: Sequence[jax.Array]) -> jax.Array:
    """The elements (N, C, P) at one place per position; those outside are zero."""
    flat, inside = find_elements(x.shape, sizes, places)
    everywhere = jnp.broadcast_to(flat[:, None], (*x.shape[:2], flat.shape[1]))
    taken = jnp.take_along_axis(jax.lax.collapse(x, 2), everywhere, 2, mode="promise_in_bounds")
    return jnp.where(inside[:, None], taken, jnp.zeros((), x.dtype))


def spread(grad: jax.Array, shape: Sequence[int], sizes: Sequence[Size], corners: Corners) -> jax.Array:
    """The gradient of `weighted_sum` by the image of this shape: rows of all channels are added, in one scatter."""
    indices, rows = [], []
    for places, weight in corners:
        flat, inside = find_elements(shape, sizes, places)
        indices.append(flat)
        rows.append(jnp.moveaxis(jnp.where(inside[:, None], grad * weight[:, None], jnp.zeros((), grad.dtype)), 1, 2))
    batch = jnp.arange(shape[0])[:, None]
    image = jnp.zeros((shape[0], math.prod(shape[2:]), shape[1]), grad.dtype)
    image = image.at[batch, jnp.concatenate(indices, 1)].add(jnp.concatenate(rows, 1), mode="promise_in_bounds")
    return jnp.moveaxis(image, 2, 1).reshape(tuple(shape))


def linear_corners(positions: Sequence[jax.Array]) -> Corners:
    floors = [jax.lax.stop_gradient(jnp.floor(p)) for p in positions]
    for corner in product((0, 1), repeat=len(positions)):
        weight = jnp.ones((), positions[0].dtype)
        for side, position, floor in zip(corner, positions, floors, strict=True):
            weight = weight * (position - floor if side else floor + 1 - position)
        yield [floor + side for side, floor in zip(corner, floors, strict=True)], weight


def nearest_corners(positions: Sequence[jax.Array]) -> Corners:
    yield [jnp.round(p) for p in positions], jnp.ones_like(positions[0])


def cubic_weights(t: jax.Array) -> list[jax.Array]:
    """Weights (a = -0.75) of the four elements around a position at distance `t` after the second."""
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def cubic_corners(
    sizes: Sequence[Size], padding_mode: int, align_corners: bool, positions: Sequence[jax.Array]
) -> Corners:
    """Sixteen elements, each of which is padded by itself."""
    floors = [jax.lax.stop_gradient(jnp.floor(p)) for p in positions]
    rows, columns = (cubic_weights(p - f) for p, f in zip(positions, floors, strict=True))

    def place(axis: int, step: int) -> jax.Array:
        moved = floors[axis] + (step - 1)
        inside, _ = apply_padding_mode(moved, sizes[axis], padding_mode, align_corners)
        return jnp.trunc(inside)  # a reflected integer is integral except for rounding

    for i, j in product(range(4), repeat=2):
        yield [place(0, i), place(1, j)], rows[i] * columns[j]


def corners_in_mode(
    sizes: Sequence[Size], mode: int, padding_mode: int, align_corners: bool
) -> Callable[[Sequence[jax.Array]], Corners]:
    """Returns the function of positions that gives the elements around each, and their weights."""
    if mode == CUBIC:
        return partial(cubic_corners, sizes, padding_mode, align_corners)
    return linear_corners if mode == LINEAR else nearest_corners


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
    corners = corners_in_mode(sizes, mode, padding_mode, align_corners)(positions)
    sampled = weighted_sum(widen(x), sizes, corners)
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
    corners_of = corners_in_mode(sizes, mode, padding_mode, align_corners)
    flat_grad = jax.lax.collapse(widen(grad), 2)
    corners = list(corners_of(positions))
    by_image = spread(flat_grad, x.shape, sizes, corners)
    by_weight = [(flat_grad * read(widen(x), sizes, places)).sum(1) for places, _ in corners]
    _, pull_back = jax.vjp(lambda positions: [weight for _, weight in corners_of(positions)], positions)
    (by_position,) = pull_back(by_weight)
    by_grid = jnp.stack([g * slope for g, slope in zip(by_position, slopes, strict=True)][::-1], axis=-1)
    return by_image.astype(x.dtype), by_grid.reshape(grid.shape).astype(grid.dtype)
