"""Views, copies, permutations and broadcasts.

JAX arrays have no strides: a view is a copy, which XLA removes if it can. Ops that read storage (`as_strided`) assume
that the input's storage is its own elements in row-major order, from offset 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import diagonals as diagonals_rules
from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.bucketing.pad_rules import views as views_rules
from dynaxla.bucketing.pad_rules import windows as windows_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops import aten_forms
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import as_vector, axis_of, is_complex, slice_axis, slice_bounds, strided_positions
from dynaxla.ops.dtypes import NUMBERS, STORED
from dynaxla.ops.promotion import JNP_DTYPES, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily(STORED)
OWN_STORAGE = "the input is contiguous, and starts its storage if an offset is given"


def check_own_storage(node: torch.fx.Node) -> str | None:
    """Refuses a strided view unless the input is contiguous, and starts its storage if the offset counts from there."""
    x, offset = tensor_of(node, "self"), argument(node, "storage_offset")
    if not x.is_contiguous() or (offset is not None and x.storage_offset() != 0):
        return "the input is itself a view with another storage layout"
    size, stride, offset = argument(node, "size"), argument(node, "stride"), offset or 0
    if not all(isinstance(number, int) for number in (*size, *stride, offset)):
        return "the view's sizes or strides vary"
    if math.prod(size) == 0:
        return None
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return None if last < x.numel() else "the view reaches storage beyond the input's own elements"


Ints = Sequence[int]
Arrays = tuple[jax.Array, ...]


@OPS.op(
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.detach.default,
    pad=elementwise_rules.elementwise,
    as_aten=aten_forms.alias,
)
@OPS.op(aten.lift_fresh_copy.default, pad=elementwise_rules.elementwise)
def same(x: jax.Array) -> jax.Array:
    return x


OPS.op(aten._neg_view.default, pad=elementwise_rules.elementwise)(lambda x: -x)
OPS.op(aten._neg_view_copy.default, dtypes=NUMBERS, pad=elementwise_rules.elementwise)(lambda x: -x)
OPS.op(aten._conj.default, aten._conj_copy.default, pad=elementwise_rules.elementwise)(jnp.conj)


@OPS.op(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default, pad=views_rules.view
)
@OPS.op(aten.view_copy.default, pad=views_rules.view, as_aten=decompose)
def view(x: jax.Array, size: Ints) -> jax.Array:
    known = math.prod(n for n in size if n != -1)
    return x.reshape([x.size // max(known, 1) if n == -1 else n for n in size])


@OPS.op(aten._reshape_alias.default)
def reshape_alias(x: jax.Array, size: Ints, stride: Ints) -> jax.Array:
    return x.reshape(tuple(size))


@OPS.op(aten.view.dtype, aten.view_copy.dtype, pad=views_rules.view_dtype)
def view_dtype(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Reinterprets the bytes as another dtype; the last axis grows or shrinks with the element size."""
    if torch_dtype(x) == dtype:
        return x
    if is_complex(x):
        return view_dtype(lax.collapse(view_as_real(x), x.ndim - 1), dtype)
    if dtype.is_complex:
        return view_as_complex(_in_groups(view_dtype(x, dtype.to_real()), 2))
    raw = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    target = jnp.dtype(JNP_DTYPES[torch.uint8 if dtype == torch.bool else dtype])
    ratio = target.itemsize // raw.dtype.itemsize
    bits = lax.bitcast_convert_type(_in_groups(raw, ratio) if ratio > 1 else raw, target)
    if target.itemsize < raw.dtype.itemsize:
        bits = lax.collapse(bits, x.ndim - 1)
    return bits.astype(bool) if dtype == torch.bool else bits


def _in_groups(x: jax.Array, width: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


@OPS.op(aten.view_as_real.default, aten.view_as_real_copy.default, pad=views_rules.view_as_real)
def view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@OPS.op(aten.view_as_complex.default, aten.view_as_complex_copy.default, pad=views_rules.view_as_complex)
def view_as_complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@OPS.op(aten.expand.default, pad=views_rules.expand)
@OPS.op(aten.expand_copy.default, pad=views_rules.expand, as_aten=decompose)
def expand(x: jax.Array, size: Ints, *, implicit: bool = False) -> jax.Array:
    added = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[axis - added] if n == -1 else n for axis, n in enumerate(size)])


@OPS.op(aten.permute.default, pad=views_rules.permute)
@OPS.op(aten.permute_copy.default, pad=views_rules.permute, as_aten=decompose)
def permute(x: jax.Array, dims: Ints) -> jax.Array:
    return lax.transpose(x, [axis_of(d, x.ndim) for d in dims])


@OPS.op(aten.transpose.int, pad=views_rules.permute)
@OPS.op(aten.transpose_copy.int, pad=views_rules.permute, as_aten=decompose)
def transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@OPS.op(aten.t.default, pad=views_rules.permute)
@OPS.op(aten.t_copy.default, pad=views_rules.permute, as_aten=decompose)
def t(x: jax.Array) -> jax.Array:
    return x.T


@OPS.op(aten.squeeze.dims, aten.squeeze_copy.dims, pad=views_rules.squeeze, as_aten=decompose)
def squeeze_dims(x: jax.Array, dim: Ints) -> jax.Array:
    axes = {axis_of(d, x.ndim) for d in dim} if x.ndim else set()
    return lax.squeeze(x, [axis for axis in axes if x.shape[axis] == 1])


@OPS.op(aten.squeeze.default, pad=views_rules.squeeze)
@OPS.op(aten.squeeze_copy.default, pad=views_rules.squeeze, as_aten=decompose)
def squeeze(x: jax.Array) -> jax.Array:
    return squeeze_dims(x, range(x.ndim))


@OPS.op(aten.squeeze.dim, pad=views_rules.squeeze)
@OPS.op(aten.squeeze_copy.dim, pad=views_rules.squeeze, as_aten=decompose)
def squeeze_dim(x: jax.Array, dim: int) -> jax.Array:
    return squeeze_dims(x, [dim])


@OPS.op(aten.unsqueeze.default, pad=views_rules.unsqueeze)
@OPS.op(aten.unsqueeze_copy.default, pad=views_rules.unsqueeze, as_aten=decompose)
def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(x, dim)


@OPS.op(aten.select.int, aten.select_copy.int, pad=views_rules.select)
def select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, axis_of(dim, x.ndim), keepdims=False)


@OPS.op(aten.slice.Tensor, aten.slice_copy.Tensor, pad=views_rules.slice_)
def slice_tensor(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    return slice_axis(x, axis, *slice_bounds(x.shape[axis], start, end), step)


@OPS.op(aten.narrow_copy.default, as_aten=decompose)
def narrow_copy(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return slice_axis(x, axis, first, first + length)


@OPS.op(internal.GATHER_STRIDED, pad=views_rules.as_strided)
@OPS.op(
    aten.as_strided.default,
    aten.as_strided_copy.default,
    check=check_own_storage,
    pad=views_rules.as_strided,
    limits=OWN_STORAGE,
)
def as_strided(x: jax.Array, size: Ints, stride: Ints, storage_offset: int | None = None) -> jax.Array:
    if math.prod(size) == 0:
        return jnp.zeros(tuple(size), x.dtype)
    return x.reshape(-1).at[strided_positions(size, stride, storage_offset)].get(mode="promise_in_bounds")


@OPS.op(aten.unfold.default, aten.unfold_copy.default, pad=windows_rules.unfold)
def unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Windows of `size` along one axis; the elements of a window are on a new last axis."""
    if x.ndim == 0:
        return as_vector(x)[:size]
    axis = axis_of(dimension, x.ndim)
    count = (x.shape[axis] - size) // step + 1
    places = step * jnp.arange(count)[:, None] + jnp.arange(size)[None, :]
    windows = x.at[(slice(None),) * axis + (places,)].get(mode="promise_in_bounds")
    return jnp.moveaxis(windows, axis + 1, -1)


@OPS.op(aten.diagonal.default, aten.diagonal_copy.default, pad=diagonals_rules.diagonal)
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.asarray(jnp.diagonal(x, offset, dim1, dim2))


@OPS.op(aten.diag_embed.default, pad=diagonals_rules.diag_embed, as_aten=decompose)
def diag_embed(x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    side = x.shape[-1] + abs(offset)
    row = lax.broadcasted_iota(jnp.int32, (side, side), 0)
    column = lax.broadcasted_iota(jnp.int32, (side, side), 1)
    first, last = max(-offset, 0), x.shape[-1]
    spread = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(first, side - first - last)])
    placed = jnp.where(column - row == offset, spread[..., :, None], jnp.zeros((), x.dtype))
    return jnp.moveaxis(placed, (-2, -1), (axis_of(dim1, x.ndim + 1), axis_of(dim2, x.ndim + 1)))
