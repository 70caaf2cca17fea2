"""Padding by a constant, by reflection and by repetition of the edge; a negative width crops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.argument_roles import PadRule
from dynaxla.bucketing.pad_rules import image_gradients as image_gradients_rules
from dynaxla.bucketing.pad_rules import padding as padding_rules
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import Scalar, constant, slice_axis, widen
from dynaxla.ops.dtypes import NUMBERS, STORED
from dynaxla.ops.eager_errors import check_all, check_numbers_fit
from dynaxla.ops.record import Body, OpFamily
from dynaxla.torch_api.symbols import example

aten = torch.ops.aten
OPS = OpFamily()

PadAxis = Callable[[jax.Array, int, int, int], jax.Array]


def _check_crops(node: Node) -> str | None:
    """Refuses to take more elements away than a dim has, even if as many are put to its other side."""
    sizes, given = tensor_of(node, "self").shape, argument(node, "pad")
    pad = [example(width.meta["val"] if isinstance(width, Node) else width) for width in given]
    for place, size in enumerate(sizes[: -len(pad) // 2 - 1 : -1]):
        if example(size) + sum(min(0, width) for width in pad[2 * place : 2 * place + 2]) < 0:
            return "a crop of more elements than the dim has"
    return None


@OPS.op(
    aten.constant_pad_nd.default,
    dtypes=STORED,
    check=check_all(_check_crops, check_numbers_fit("value")),
    pad=padding_rules.pad,
)
def constant_pad(x: jax.Array, pad: Sequence[int], value: Scalar = 0) -> jax.Array:
    sides = [(0, 0, 0)] * x.ndim
    for place in range(len(pad) // 2):
        sides[x.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1], 0)
    return lax.pad(x, constant(value, x.dtype), sides)


def reflect_axis(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """Reflection padding: the elements next to the edge, reversed; the edge itself is not repeated."""
    size = x.shape[axis]
    parts = [slice_axis(x, axis, max(0, -before), size + min(0, after))]
    if before > 0:
        parts.insert(0, lax.rev(slice_axis(x, axis, 1, before + 1), (axis,)))
    if after > 0:
        parts.append(lax.rev(slice_axis(x, axis, size - 1 - after, size - 1), (axis,)))
    return lax.concatenate(parts, axis)


def repeat_edge(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """Edge padding: the first element `before` times, and the last `after` times."""
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
    """Pads each axis; `padding` has two widths per axis, the last axis first."""
    for place in range(len(padding) // 2):
        x = pad_axis(x, x.ndim - 1 - place, padding[2 * place], padding[2 * place + 1])
    return x


def pad_axes_backward(grad: jax.Array, x: jax.Array, padding: Sequence[int], *, pad_axis: PadAxis) -> jax.Array:
    """The gradient of `pad_axes`: each element gets the sum of its copies' gradients; 16-bit floats are added in float32."""
    wide = widen(grad)
    forward = partial(pad_axes, padding=padding, pad_axis=pad_axis)
    (result,) = jax.linear_transpose(forward, jnp.zeros(x.shape, wide.dtype))(wide)
    return jnp.asarray(result).astype(x.dtype)


_WITHOUT_DECOMPOSITION = ("reflection_pad1d", *(f"replication_pad{rank}d_backward" for rank in (1, 2, 3)))
"""torch-mlir lowers the first right as it is, and the others not even through their decompositions."""


def _register(name: str, body: Body, pad: PadRule) -> None:
    form = None if name in _WITHOUT_DECOMPOSITION else decompose
    OPS.op(getattr(aten, name).default, dtypes=NUMBERS, pad=pad, as_aten=form)(body)


for _rank in (1, 2, 3):
    for _name, _pad_axis in ((f"reflection_pad{_rank}d", reflect_axis), (f"replication_pad{_rank}d", repeat_edge)):
        _register(_name, partial(pad_axes, pad_axis=_pad_axis), padding_rules.edge_pad)
        _backward = partial(pad_axes_backward, pad_axis=_pad_axis)
        _register(_name + "_backward", _backward, image_gradients_rules.edge_pad_backward)
