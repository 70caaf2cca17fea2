"""Padding by a constant, by reflection and by repetition of the edge; a negative width crops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.rules import edges as edges_rules
from dynaxla.bucketing.rules import image_gradients as image_gradients_rules
from dynaxla.ops.axes_and_dtypes import Scalar, constant, slice_axis, widened
from dynaxla.ops.dtypes import NUMBERS
from dynaxla.ops.findings import COMPUTED
from dynaxla.ops.record import Family, right

aten = torch.ops.aten
OPS = Family()

PadAxis = Callable[[jax.Array, int, int, int], jax.Array]


@OPS.op(aten.constant_pad_nd.default, pad=edges_rules.pad, torch_mlir=COMPUTED)
def constant_pad(x: jax.Array, pad: Sequence[int], value: Scalar = 0) -> jax.Array:
    sides = [(0, 0, 0)] * x.ndim
    for place in range(len(pad) // 2):
        sides[x.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1], 0)
    return lax.pad(x, constant(value, x.dtype), sides)


def reflect_axis(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """The elements beside the edge, in reverse; the edge itself is not repeated."""
    size = x.shape[axis]
    parts = [slice_axis(x, axis, max(0, -before), size + min(0, after))]
    if before > 0:
        parts.insert(0, lax.rev(slice_axis(x, axis, 1, before + 1), (axis,)))
    if after > 0:
        parts.append(lax.rev(slice_axis(x, axis, size - 1 - after, size - 1), (axis,)))
    return lax.concatenate(parts, axis)


def repeat_edge(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """The first element `before` times, and the last `after` times."""
    size = x.shape[axis]
    parts = [slice_axis(x, axis, max(0, -before), size + min(0, after))]
    if before > 0:
        edge = slice_axis(x, axis, 0, 1)
        parts.insert(0, jnp.broadcast_to(edge, (*x.shape[:axis], before, *x.shape[axis + 1 :])))
    if after > 0:
        edge = slice_axis(x, axis, size - 1, size)
        parts.append(jnp.broadcast_to(edge, (*x.shape[:axis], after, *x.shape[axis + 1 :])))
    return lax.concatenate(parts, axis)


def pad_axes(x: jax.Array, padding: Sequence[int], *, pad_axis: PadAxis) -> jax.Array:
    """`padding` holds two widths for each axis, the last axis first."""
    for place in range(len(padding) // 2):
        x = pad_axis(x, x.ndim - 1 - place, padding[2 * place], padding[2 * place + 1])
    return x


def pad_axes_backward(grad: jax.Array, x: jax.Array, padding: Sequence[int], *, pad_axis: PadAxis) -> jax.Array:
    """The gradient gathers up where each element went; 16-bit floats are added in float32."""
    wide = widened(grad)
    forward = partial(pad_axes, padding=padding, pad_axis=pad_axis)
    (result,) = jax.linear_transpose(forward, jnp.zeros(x.shape, wide.dtype))(wide)
    return jnp.asarray(result).astype(x.dtype)


_LOWERED = ("reflection_pad1d",)

for _rank in (1, 2, 3):
    for _name, _pad_axis in ((f"reflection_pad{_rank}d", reflect_axis), (f"replication_pad{_rank}d", repeat_edge)):
        OPS.op(
            getattr(aten, _name).default,
            pad=edges_rules.repeated_edges,
            torch_mlir=(right(NUMBERS),) if _name in _LOWERED else (),
        )(partial(pad_axes, pad_axis=_pad_axis))
        OPS.op(getattr(aten, _name + "_backward").default, pad=image_gradients_rules.repeated_edges_backward)(
            partial(pad_axes_backward, pad_axis=_pad_axis)
        )
