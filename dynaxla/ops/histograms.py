"""Histograms: counts of elements, or of points, in bins between given edges.

An element is in the bin with the last left edge that is not above it; the last edge belongs to the last bin. Elements
outside and NaN are not counted. Counts are int64 and rounded once; eager PyTorch counts in the dtype of its result, and
stops at 2**24 in float32. Edges must ascend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import segments as segments_rules
from dynaxla.ops.axes_and_dtypes import Scalar, constant
from dynaxla.ops.dtypes import WIDE_FLOATS
from dynaxla.ops.insertion_points import insertion_points
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

FIXED = "only fixed sizes, as torch has no fake kernel of it: else Dynamo breaks the graph"


@OPS.op(aten._histogramdd_from_bin_tensors.default, dtypes=WIDE_FLOATS, limits=FIXED)
def histogramdd(
    x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    """`x` [..., axes] are the points' coordinates, `weight` [...] their weights, `bins` the edges along each axis."""
    points = x.reshape(-1, len(bins)).T
    shape = tuple(edges.size - 1 for edges in bins)
    counted, place = jnp.ones(points.shape[1], bool), jnp.zeros(points.shape[1], jnp.int64)
    for values, edges in zip(points, bins, strict=True):
        counted &= (values >= edges[0]) & (values <= edges[-1])
        bin_of = insertion_points(edges, values, right=True) - 1
        place = place * (edges.size - 1) + jnp.minimum(bin_of, edges.size - 2)
    terms = counted.astype(jnp.int64) if weight is None else weight.reshape(-1)
    place = jnp.where(counted, place, math.prod(shape))
    total = jnp.zeros(math.prod(shape), terms.dtype).at[place].add(terms, mode="drop").astype(x.dtype)
    return _density(total.reshape(shape), bins) if density else total.reshape(shape)


@OPS.op(aten.histogram.bins_tensor, dtypes=WIDE_FLOATS, limits=FIXED)
def histogram(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return histogramdd(x.reshape(-1, 1), [bins], weight=weight, density=density), bins


@OPS.op(
    aten.histc.default,
    pad=segments_rules.histogram,
    limits="a range taken from data with infinities or NaN, for which torch raises, is not detected",
)
def histc(x: jax.Array, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> jax.Array:
    """torch raises if the range is that of data with an infinity or NaN; here the counts are then zero."""
    flat = x.reshape(-1)
    low, high = constant(min, x.dtype), constant(max, x.dtype)
    if min == max and flat.size:
        low, high = jnp.min(flat), jnp.max(flat)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (flat >= low) & (flat <= high)
    place = jnp.where(inside, (flat - low) * bins / (high - low), 0).astype(jnp.int64)
    counts = jnp.zeros(bins, jnp.int64).at[jnp.minimum(place, bins - 1)].add(inside.astype(jnp.int64))
    return counts.astype(x.dtype)


def _density(counts: jax.Array, bins: Sequence[jax.Array]) -> jax.Array:
    """The density: each bin's share of the total count, divided by the bin's volume."""
    density = counts / jnp.sum(counts)
    for axis, edges in enumerate(bins):
        density = density / jnp.diff(edges).reshape([-1 if axis == a else 1 for a in range(len(bins))])
    return density
