"""Counting elements, or rows of coordinates, in bins between given edges.

An element lies in the bin whose left edge is the last one that is not above it; the last edge belongs to the last bin. What
lies outside, and NaN, is not counted. Counts are whole numbers until they are rounded once; eager counts in the dtype of its
result, and stops at 2**24 in float32. Of edges that do not ascend torch promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from dynaxla.ops.dtypes import WIDE_FLOATS
from dynaxla.ops.indexing import insertion_points
from dynaxla.ops.record import Family

aten = torch.ops.aten
OPS = Family()

FIXED = "only where no size varies, as torch has no fake kernel of it: else Dynamo ends the graph"


@OPS.op(aten._histogramdd_from_bin_tensors.default, dtypes=WIDE_FLOATS, limits=FIXED)
def histogramdd(
    x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    """`x` [..., axes] holds coordinates, `weight` [...] what each point counts for, `bins` the edges along each axis."""
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
    return _per_volume(total.reshape(shape), bins) if density else total.reshape(shape)


@OPS.op(aten.histogram.bins_tensor, dtypes=WIDE_FLOATS, limits=FIXED)
def histogram(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return histogramdd(x.reshape(-1, 1), [bins], weight=weight, density=density), bins


def _per_volume(counts: jax.Array, bins: Sequence[jax.Array]) -> jax.Array:
    """The share of each bin in all that is counted, by its extent along each axis."""
    density = counts / jnp.sum(counts)
    for axis, edges in enumerate(bins):
        density = density / jnp.diff(edges).reshape([-1 if axis == a else 1 for a in range(len(bins))])
    return density
