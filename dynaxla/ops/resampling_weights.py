"""Static tables of source indices and weights for resampling, with the arithmetic of torch's CPU kernels.

A resampling along one axis is `out[o] = sum over t of weight[o, t] * x[index[o, t]]`. The tables depend on sizes
and scales only, so they are numpy arrays here and constants in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from dynaxla.ops.indexing import subscript_of_axis

Floating = type[np.float32] | type[np.float64]
Filter = Callable[[NDArray[np.floating]], NDArray[np.floating]]

UNROLLED = 4
"""Up to this many taps are added one by one, as in torch; more are gathered at once and reduced."""


@dataclass(frozen=True, slots=True)
class Taps:
    """The source elements of each of O outputs on one axis, T per output.

    Attributes:
        index: int64 (O, T), within the axis.
        weight: (O, T), or None if every weight is 1.
        valid: bool (O, T), or None if all taps are valid; invalid taps read nothing, so NaN and infinity there do not matter.
    """

    index: NDArray[np.int64]
    weight: NDArray[np.floating] | None = None
    valid: NDArray[np.bool_] | None = None


def apply_taps(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    """Resamples `x` on `axis`, in the dtype of `x`."""
    count = taps.index.shape[1]
    if count == 0:
        return jnp.zeros((*x.shape[:axis], taps.index.shape[0], *x.shape[axis + 1 :]), x.dtype)
    if count <= UNROLLED and taps.valid is None:
        total = _one_tap(x, axis, taps, 0)
        for place in range(1, count):
            total = total + _one_tap(x, axis, taps, place)
        return total
    taken = x.at[subscript_of_axis(axis, jnp.asarray(taps.index))].get(mode="promise_in_bounds")
    trailing = (1,) * (x.ndim - axis - 1)
    if taps.weight is not None:
        taken = taken * jnp.asarray(taps.weight.reshape(taps.weight.shape + trailing), x.dtype)
    if taps.valid is not None:
        taken = jnp.where(taps.valid.reshape(taps.valid.shape + trailing), taken, jnp.zeros((), x.dtype))
    return taken.sum(axis + 1, dtype=x.dtype)


def _one_tap(x: jax.Array, axis: int, taps: Taps, place: int) -> jax.Array:
    taken = _take(x, axis, taps.index[:, place])
    if taps.weight is None:
        return taken
    return taken * jnp.asarray(taps.weight[:, place].reshape((-1,) + (1,) * (x.ndim - axis - 1)), x.dtype)


def _take(x: jax.Array, axis: int, index: NDArray[np.int64]) -> jax.Array:
    """Takes constant indices of `x` on an axis; by a copy, a slice or a broadcast if possible."""
    size, count = x.shape[axis], len(index)
    if np.array_equal(index, np.arange(index[0], index[0] + count)):
        return lax.slice_in_dim(x, int(index[0]), int(index[0]) + count, axis=axis)
    if count % size == 0 and np.array_equal(index, np.repeat(np.arange(size), count // size)):
        times = count // size
        spread = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], times, *x.shape[axis + 1 :]))
        return spread.reshape(*x.shape[:axis], count, *x.shape[axis + 1 :])
    return x.at[subscript_of_axis(axis, jnp.asarray(index))].get(mode="promise_in_bounds")


def transpose_taps(taps: Taps, size: int) -> Taps:
    """The taps of the transposed map, to an axis of `size`: the backward pass then gathers, whereas a vjp would scatter."""
    valid = np.ones(taps.index.shape, bool) if taps.valid is None else taps.valid
    outputs, places = np.nonzero(valid)
    inputs = taps.index[outputs, places]
    order = np.argsort(inputs, kind="stable")
    inputs, outputs, places = inputs[order], outputs[order], places[order]
    counts = np.bincount(inputs, minlength=size)
    rank = np.arange(len(inputs)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (size, int(counts.max(initial=0)))
    index, filled = np.zeros(shape, np.int64), np.zeros(shape, bool)
    index[inputs, rank], filled[inputs, rank] = outputs, True
    weight = None
    if taps.weight is not None:
        weight = np.zeros(shape, taps.weight.dtype)
        weight[inputs, rank] = taps.weight[outputs, places]
    return Taps(index, weight, None if filled.all() else filled)


def scale_of(size: int, out: int, align_corners: bool, factor: float | None, kind: Floating) -> np.floating:
    """The distance of source positions of neighbouring outputs, rounded to `kind`."""
    if align_corners:
        return kind(size - 1) / kind(out - 1) if out > 1 else kind(0)
    return kind(1.0 / factor) if factor is not None and factor > 0 else kind(size) / kind(out)


def source_positions(scale: np.floating, out: int, align_corners: bool, cubic: bool) -> NDArray[np.floating]:
    """The source position of each output; below 0 only for cubic."""
    kind = type(scale)
    places = np.arange(out).astype(kind)
    if align_corners:
        return np.asarray(scale * places)
    if kind is np.float32:  # torch's kernels use fused multiply-add: the product is not rounded separately
        positions = (np.float64(scale) * (places + 0.5).astype(np.float64) - 0.5).astype(np.float32)
    else:
        positions = scale * (places + kind(0.5)) - kind(0.5)
    return np.asarray(positions if cubic else np.maximum(positions, kind(0)))


def split_position(positions: NDArray[np.floating], size: int) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    """The element at or before each position (computed in float32 for every dtype, as in torch), and the fraction (0 to 1)."""
    index = np.minimum(np.floor(positions.astype(np.float32)).astype(np.int64), size - 1)
    rest = positions - index.astype(positions.dtype)
    return index, np.clip(rest, 0, 1).astype(positions.dtype)


def legacy_nearest_taps(size: int, out: int, factor: float | None, exact: bool) -> Taps:
    """The nearest elements by the formula of channels-last kernels, small images and all backward passes."""
    places = np.arange(out)
    if not exact and out == size:
        index = places
    elif not exact and out == 2 * size:
        index = places >> 1
    else:
        scale = scale_of(size, out, False, factor, np.float32)
        # torch multiplies float by float for nearest, and double by float for nearest-exact
        position = (places + 0.5) * np.float64(scale) if exact else places.astype(np.float32) * scale
        index = np.minimum(np.floor(position.astype(np.float32)).astype(np.int64), size - 1)
    return Taps(index.astype(np.int64)[:, None])


def nearest_taps(size: int, out: int, factor: float | None, exact: bool, kind: Floating) -> Taps:
    """The nearest elements by the formula of the general kernel."""
    positions = source_positions(scale_of(size, out, False, factor, kind), out, not exact, False)
    if exact:
        positions = positions.astype(np.float64) + 0.5
    index = np.minimum(np.floor(positions.astype(np.float32)).astype(np.int64), size - 1)
    return Taps(index[:, None])


def linear_taps(size: int, out: int, align_corners: bool, factor: float | None, kind: Floating) -> Taps:
    """The two elements around each position."""
    if size == out:
        places = np.arange(out, dtype=np.int64)
        return Taps(np.stack([places, places], 1), np.stack([np.ones(out, kind), np.zeros(out, kind)], 1))
    positions = source_positions(scale_of(size, out, align_corners, factor, kind), out, align_corners, False)
    index, rest = split_position(positions, size)
    return Taps(np.stack([index, np.minimum(index + 1, size - 1)], 1), np.stack([kind(1) - rest, rest], 1))


def cubic_taps(size: int, out: int, align_corners: bool, factor: float | None, kind: Floating) -> Taps:
    """The four elements around each position; the edge is repeated outside of the input."""
    positions = source_positions(scale_of(size, out, align_corners, factor, kind), out, align_corners, True)
    index, rest = split_position(positions, size)
    weights = cubic_weights(rest)
    return Taps(np.clip(index[:, None] + np.arange(-1, 3), 0, size - 1), np.stack(weights, 1))


def cubic_weights(rest: NDArray[np.floating]) -> list[NDArray[np.floating]]:
    """torch's weights (a = -0.75) of the four elements around a position."""
    one = rest.dtype.type(1)
    back = one - rest
    return [
        _cubic_far(rest + one, -0.75),
        _cubic_near(rest, -0.75),
        _cubic_near(back, -0.75),
        _cubic_far(back + one, -0.75),
    ]


def _cubic_near(x: NDArray[np.floating], a: float) -> NDArray[np.floating]:
    kind = x.dtype.type
    return np.asarray((kind(a + 2) * x - kind(a + 3)) * x * x + kind(1))


def _cubic_far(x: NDArray[np.floating], a: float) -> NDArray[np.floating]:
    kind = x.dtype.type
    return np.asarray(((kind(a) * x - kind(5 * a)) * x + kind(8 * a)) * x - kind(4 * a))


def triangle_filter(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """The linear filter: the weight of an element at distance `x`."""
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0).astype(x.dtype)


def cubic_filter(x: NDArray[np.floating], a: float = -0.5) -> NDArray[np.floating]:
    """The cubic filter, with Pillow's a = -0.5, which torch uses for antialiasing."""
    x = np.abs(x)
    return np.where(x < 1, _cubic_near(x, a), np.where(x < 2, _cubic_far(x, a), 0)).astype(x.dtype)


def lanczos_filter(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """The Lanczos filter with three lobes."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0).astype(x.dtype)


def antialias_taps(
    size: int, out: int, align_corners: bool, factor: float | None, kind: Floating, filter_: Filter, width: int
) -> Taps:
    """All elements under the filter, which covers `width` elements (upsampling) or `width` output intervals (downsampling).

    The mix of double and `kind` is that of torch's C++ code.
    """
    scale = scale_of(size, out, align_corners, factor, kind)
    reach = kind(width * 0.5 * float(scale)) if scale >= 1 else kind(width * 0.5)
    inverse = kind(1.0 / float(scale)) if scale >= 1 else kind(1)
    most = int(np.ceil(np.float32(reach))) * 2 + 1
    center: NDArray[Any] = (float(scale) * (np.arange(out) + 0.5)).astype(kind)
    first = np.maximum(np.trunc((center - reach).astype(np.float64) + 0.5).astype(np.int64), 0)
    last = np.minimum(np.trunc((center + reach).astype(np.float64) + 0.5).astype(np.int64), size)
    count = np.clip(last - first, 0, most)
    index = first[:, None] + np.arange(most)
    valid = np.arange(most) < count[:, None]
    distance = (((index.astype(kind) - center[:, None]).astype(np.float64) + 0.5) * float(inverse)).astype(kind)
    weight = np.where(valid, filter_(distance), kind(0))
    total = weight.sum(1, keepdims=True, dtype=kind)
    weight = np.divide(weight, total, out=weight.copy(), where=total != 0)
    return Taps(np.clip(index, 0, size - 1), weight, valid)


def fixed_point(taps: Taps) -> tuple[Taps, int]:
    """Weights as int16 with as many fraction bits as the largest weight allows, and the number of bits."""
    if taps.weight is None:
        raise ValueError("taps without weights have no fixed-point form")
    largest, bits = float(taps.weight.max(initial=0)), 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = taps.weight.astype(np.float64) * (1 << bits)
    return Taps(taps.index, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32), taps.valid), bits


def merge_repeated(taps: Taps, size: int) -> Taps:
    """Merges repeated elements at the edge into one tap with the sum of their weights, as torch's uint8 kernels do."""
    if taps.weight is None:
        raise ValueError("taps without weights cannot be added up")
    count = taps.index.shape[1]
    first = np.clip(taps.index.min(1), 0, max(size - count, 0))
    weight = np.zeros((len(first), min(count, size)), taps.weight.dtype)
    np.add.at(weight, (np.arange(len(first))[:, None], taps.index - first[:, None]), taps.weight)
    return Taps(first[:, None] + np.arange(weight.shape[1]), weight)
