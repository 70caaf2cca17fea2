"""Segment reductions: runs of elements along an axis, with lengths in a tensor."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.axes_and_dtypes import Scalar, widen
from dynaxla.ops.dtypes import FLOATS, INT32_INT64
from dynaxla.ops.insertion_points import insertion_points
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

_KINDS = {"sum": (0.0, "add"), "mean": (0.0, "add"), "prod": (1.0, "multiply")}
_KINDS |= dict.fromkeys(("max", "amax"), (-math.inf, "max")) | dict.fromkeys(("min", "amin"), (math.inf, "min"))


def check_segments(node: torch.fx.Node) -> str | None:
    """Refuses calls for which torch raises, and calls that describe the segments in two ways."""
    if argument(node, "indices") is not None:
        return "segments by indices"
    if (argument(node, "lengths") is None) == (argument(node, "offsets") is None):
        return "it takes either lengths or offsets"
    if not tensor_of(node, "data").is_floating_point():
        return "elements that are not floats"
    segments = tensor_of(node, "offsets" if argument(node, "lengths") is None else "lengths")
    if segments.dtype not in INT32_INT64:
        return f"segments of {segments.dtype}"
    rank, axis = tensor_of(node, "data").ndim, argument(node, "axis")
    if rank < segments.ndim or axis % rank != segments.ndim - 1:
        return f"axis={axis}, which is not the last axis of the segments"
    return None if argument(node, "reduce") in _KINDS else f"reduce={argument(node, 'reduce')}"


@OPS.op(
    aten.segment_reduce.default,
    dtypes=FLOATS | INT32_INT64,
    check=check_segments,
    limits="lengths or offsets; where they do not fit the elements, for which torch raises, the result is NaN",
)
def segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Scalar | None = None,
) -> jax.Array:
    """Reduces `data` [*outer, n, *inner] to [*outer, segments, *inner]; `lengths` are [*outer, segments], `offsets` one longer.

    float16 and bfloat16 are reduced in float32 and rounded once. Elements before the first offset and after the last are in no
    segment.
    """
    bounds = _offsets_of(lengths) if lengths is not None else offsets
    if bounds is None:
        raise ValueError("segment_reduce needs lengths or offsets")
    axis, segments = bounds.ndim - 1, bounds.shape[-1] - 1
    size, outer, inner = data.shape[axis], data.shape[:axis], data.shape[axis + 1 :]
    edges = bounds.astype(jnp.int64).reshape(math.prod(outer), segments + 1)
    rows = widen(data).reshape(edges.shape[0], size, math.prod(inner))
    start, update = _KINDS[reduce]
    reduced = jnp.full((edges.shape[0], segments, rows.shape[2]), start if initial is None else initial, rows.dtype)
    reduced = getattr(reduced.at[_segment_subscript(edges, size)], update)(rows, mode="drop")
    if reduce == "mean":
        counts = jnp.diff(edges)[..., None].astype(rows.dtype)
        reduced = reduced / (counts if initial is None else jnp.maximum(counts, 1))
    reduced = jnp.where(_are_valid(edges, size, all_of_it=lengths is not None and not unsafe), reduced, math.nan)
    return reduced.astype(data.dtype).reshape(*outer, segments, *inner)


def _offsets_of(lengths: jax.Array) -> jax.Array:
    """The offsets of segments from their lengths: the starts, and the end of the last."""
    ends = jnp.cumsum(lengths, axis=-1, dtype=jnp.int64)
    return jnp.pad(ends, [(0, 0)] * (lengths.ndim - 1) + [(1, 0)])


def _segment_subscript(edges: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """A subscript of each element's row [rows, 1] and segment [rows, size]; out of range for elements in no segment."""
    rows, segments = edges.shape[0], edges.shape[1] - 1
    elements = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int64), (rows, size))
    found = insertion_points(edges, elements, right=True) - 1
    return jnp.arange(rows, dtype=jnp.int64)[:, None], jnp.where(found < 0, segments, found)


def _are_valid(edges: jax.Array, size: int, all_of_it: bool) -> jax.Array:
    """Whether the segments are valid runs of the elements, as torch requires."""
    inside = (edges[:, 0] >= 0) & (edges[:, -1] <= size) & jnp.all(jnp.diff(edges) >= 0, axis=1)
    return jnp.all(inside & (edges[:, -1] == size) if all_of_it else inside)
