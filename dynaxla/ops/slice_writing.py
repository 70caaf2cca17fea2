"""Writes to slices, positions and diagonals of a tensor, and the gradients of reading them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import diagonals as diagonals_rules
from dynaxla.bucketing.pad_rules import gradients as gradients_rules
from dynaxla.bucketing.pad_rules import scattering as scattering_rules
from dynaxla.custom_ops.dynamic_slice import WINDOW, WINDOW_SCATTER
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.ops import aten_forms
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import axis_of, slice_bounds, strided_positions
from dynaxla.ops.dtypes import STORED, XLA_DTYPES
from dynaxla.ops.eager_errors import reason_not_of_shape
from dynaxla.ops.indexing import subscript_of_axis
from dynaxla.ops.promotion import cast, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.scattering import combine_into
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict
from dynaxla.ops.views import OWN_STORAGE, check_own_storage

aten = torch.ops.aten
OPS = OpFamily()

_SCATTERS = Finding(Verdict.SLOWER, XLA_DTYPES, "a scatter, index by index, which XLA computes apart from other ops")


def check_position(node: Node) -> str | None:
    """Refuses a position that the dim does not have, and a source of other sizes: torch's fake kernel does not look."""
    x, source, dim, index = (arguments_of(node)[name] for name in ("self", "src", "dim", "index"))
    sizes = list(x.meta["val"].shape)
    if not sizes:
        return "a position of a number"
    size = sizes.pop(dim)
    if isinstance(size, int) and isinstance(index, int) and not -size <= index < size:
        return f"position {index} of {size}"
    return reason_not_of_shape(source.meta["val"], sizes)


def check_slice(node: Node) -> str | None:
    """Refuses a slice along a dim that the tensor does not have or with steps back, and a source of other sizes."""
    given = arguments_of(node)
    sizes, dim, bounds = list(given["self"].meta["val"].shape), given["dim"], (given["start"], given["end"])
    if not -len(sizes) <= dim < len(sizes):
        return f"dim {dim} of a tensor of {len(sizes)} dims"
    if not all(isinstance(number, int | None) for number in (sizes[dim], *bounds, given["step"])):
        return None
    if given["step"] <= 0:
        return f"a step of {given['step']}"
    sizes[dim] = len(range(*slice_bounds(sizes[dim], *bounds), given["step"]))
    return reason_not_of_shape(given["src"].meta["val"], sizes)


def check_diagonal(node: Node) -> str | None:
    """Refuses a diagonal along one dim, and a source of other sizes."""
    given = arguments_of(node)
    x, dims = given["self"].meta["val"], (given["dim1"], given["dim2"])
    if len({axis_of(dim, x.ndim) for dim in dims}) < 2 or x.ndim < 2:
        return f"a diagonal of dims {dims[0]} and {dims[1]} of a tensor of {x.ndim} dims"
    return reason_not_of_shape(given["src"].meta["val"], torch.diagonal(x, given["offset"], *dims).shape)


@OPS.op(
    aten.select_scatter.default,
    dtypes=STORED,
    check=check_position,
    pad=scattering_rules.select_scatter,
    as_aten=decompose,
    torch_mlir=(_SCATTERS,),
)
def select_scatter(x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    return _write(x, jnp.expand_dims(src, axis), axis, index % x.shape[axis], 1)


@OPS.op(
    aten.slice_scatter.default,
    dtypes=STORED,
    check=check_slice,
    pad=scattering_rules.slice_scatter,
    as_aten=aten_forms.slice_scatter,
    torch_mlir=(_SCATTERS,),
)
def slice_scatter(
    x: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first, _ = slice_bounds(x.shape[axis], start, end)
    return _write(x, src, axis, first, step)


def _write(x: jax.Array, source: jax.Array, axis: int, first: int, step: int) -> jax.Array:
    """The tensor with the source at every `step`th place along an axis, from the first on.

    Most of each row is chosen in one pass: written after a copy of the rest, it took 2.4 times as long on a CPU.
    """
    source, size, count = cast(source, torch_dtype(x)), x.shape[axis], source.shape[axis]
    if count == 0:
        return x
    if step == 1 and (axis < x.ndim - 1 or 2 * count < size):
        return lax.dynamic_update_slice_in_dim(x, source, first, axis)
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis) - first
    is_written = (places >= 0) & (places < step * count) & (places % step == 0)
    return jnp.where(is_written, _spread(source, size, axis, first, step), x)


@OPS.op(aten.diagonal_scatter.default, dtypes=STORED, check=check_diagonal, pad=diagonals_rules.diagonal_scatter)
def diagonal_scatter(x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    moved = jnp.moveaxis(x, (axis_of(dim1, x.ndim), axis_of(dim2, x.ndim)), (-2, -1))
    steps = jnp.arange(src.shape[-1])
    written = moved.at[..., steps + max(-offset, 0), steps + max(offset, 0)].set(src)
    return jnp.moveaxis(written, (-2, -1), (axis_of(dim1, x.ndim), axis_of(dim2, x.ndim)))


@OPS.op(aten.as_strided_scatter.default, check=check_own_storage, limits=OWN_STORAGE)
def as_strided_scatter(
    x: jax.Array, src: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """Assumes that the storage is the elements of `x` in row-major order."""
    where = strided_positions(size, stride, storage_offset)
    return x.reshape(-1).at[where].set(src, mode="promise_in_bounds").reshape(x.shape)


@OPS.op(WINDOW, dtypes=STORED)
def window(x: jax.Array, starts: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return lax.dynamic_slice(x, list(starts), tuple(sizes))


@OPS.op(WINDOW_SCATTER, dtypes=STORED)
def window_scatter(x: jax.Array, piece: jax.Array, starts: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, piece, list(starts))


@OPS.op(aten.select_backward.default, pad=gradients_rules.select_backward)
def select_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, len(input_sizes))
    place = index % input_sizes[axis]
    return _spread(jnp.expand_dims(grad, axis), input_sizes[axis], axis, place, 1)


def _has_steps(call: Node) -> bool:
    return bool(arguments_of(call)["step"] != 1)


@OPS.op(
    aten.slice_backward.default,
    pad=gradients_rules.slice_backward,
    as_aten=aten_forms.slice_backward,
    torch_mlir=(Finding(Verdict.SLOWER, XLA_DTYPES, _SCATTERS.reason, calls=_has_steps),),
)
def slice_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> jax.Array:
    axis = axis_of(dim, len(input_sizes))
    first, _ = slice_bounds(input_sizes[axis], start, end)
    return _spread(grad, input_sizes[axis], axis, first, step)


def _spread(x: jax.Array, size: int, axis: int, first: int, step: int) -> jax.Array:
    """Zeros of a size along an axis, with the elements at every `step`th place from the first on.

    Padded, which XLA computes within other ops; a scatter it does not.
    """
    behind = size - first - step * (x.shape[axis] - 1) - 1 if x.shape[axis] else size - first
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (first, behind, step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), pads)


@OPS.op(aten.diagonal_backward.default, pad=diagonals_rules.diagonal_backward)
def diagonal_backward(grad: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> jax.Array:
    return diagonal_scatter(jnp.zeros(tuple(input_sizes), grad.dtype), grad, offset, dim1, dim2)


@OPS.op(aten.unfold_backward.default, pad=gradients_rules.unfold_backward)
def unfold_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int) -> jax.Array:
    zeros = jnp.zeros(tuple(input_sizes), grad.dtype)
    if not input_sizes:
        return grad.reshape(-1)[:1].reshape(()) if grad.size else zeros
    axis = axis_of(dim, zeros.ndim)
    places = step * jnp.arange(grad.shape[axis])[:, None] + jnp.arange(size)[None, :]
    windows = jnp.moveaxis(grad, -1, axis + 1)
    return combine_into(zeros, subscript_of_axis(axis, places), windows, "sum")
