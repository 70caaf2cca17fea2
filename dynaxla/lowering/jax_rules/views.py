"""Ops that move, repeat or rename elements without computing on them.

Arrays have no strides here: a view is a copy that XLA leaves out where it can. What reads storage (`as_strided`) takes
the input's storage to be its own elements in row-major order, from offset 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.lowering.jax_rules.axes_and_dtypes import (
    as_vector,
    axis_of,
    is_complex,
    slice_axis,
    slice_bounds,
    strided_positions,
)
from dynaxla.lowering.jax_rules.promotion import cast, torch_dtype
from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES, RuleSet

aten = torch.ops.aten
RULES = RuleSet()

Ints = Sequence[int]
Arrays = tuple[jax.Array, ...]


@RULES.rule(
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
def same(x: jax.Array) -> jax.Array:
    return x


RULES.rule(aten._neg_view.default, aten._neg_view_copy.default)(lambda x: -x)
RULES.rule(aten._conj.default, aten._conj_copy.default)(jnp.conj)


@RULES.rule(
    aten.view.default,
    aten.view_copy.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
)
def view(x: jax.Array, size: Ints) -> jax.Array:
    known = math.prod(n for n in size if n != -1)
    return x.reshape([x.size // max(known, 1) if n == -1 else n for n in size])


@RULES.rule(aten._reshape_alias.default)
def reshape_alias(x: jax.Array, size: Ints, stride: Ints) -> jax.Array:
    return x.reshape(tuple(size))


@RULES.rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """The same bytes read as another dtype; the last axis grows or shrinks with the width of the element."""
    if torch_dtype(x) == dtype:
        return x
    if is_complex(x):
        return view_dtype(view_as_real(x).reshape(*x.shape[:-1], -1), dtype)
    if dtype.is_complex:
        return view_as_complex(_in_groups(view_dtype(x, dtype.to_real()), 2))
    raw = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    target = jnp.dtype(JNP_DTYPES[torch.uint8 if dtype == torch.bool else dtype])
    ratio = target.itemsize // raw.dtype.itemsize
    bits = lax.bitcast_convert_type(_in_groups(raw, ratio) if ratio > 1 else raw, target)
    if target.itemsize < raw.dtype.itemsize:
        bits = bits.reshape(*x.shape[:-1], -1)
    return bits.astype(bool) if dtype == torch.bool else bits


def _in_groups(x: jax.Array, width: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, width)


@RULES.rule(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@RULES.rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@RULES.rule(aten.expand.default, aten.expand_copy.default)
def expand(x: jax.Array, size: Ints, *, implicit: bool = False) -> jax.Array:
    added = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[axis - added] if n == -1 else n for axis, n in enumerate(size)])


@RULES.rule(aten.permute.default, aten.permute_copy.default)
def permute(x: jax.Array, dims: Ints) -> jax.Array:
    return lax.transpose(x, [axis_of(d, x.ndim) for d in dims])


@RULES.rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@RULES.rule(aten.t.default, aten.t_copy.default)
def t(x: jax.Array) -> jax.Array:
    return x.T


@RULES.rule(aten.squeeze.dims, aten.squeeze_copy.dims)
def squeeze_dims(x: jax.Array, dim: Ints) -> jax.Array:
    axes = {axis_of(d, x.ndim) for d in dim} if x.ndim else set()
    return lax.squeeze(x, [axis for axis in axes if x.shape[axis] == 1])


@RULES.rule(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(x: jax.Array) -> jax.Array:
    return squeeze_dims(x, range(x.ndim))


@RULES.rule(aten.squeeze.dim, aten.squeeze_copy.dim)
def squeeze_dim(x: jax.Array, dim: int) -> jax.Array:
    return squeeze_dims(x, [dim])


@RULES.rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(x, dim)


@RULES.rule(aten.select.int, aten.select_copy.int)
def select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, axis_of(dim, x.ndim), keepdims=False)


@RULES.rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    return slice_axis(x, axis, *slice_bounds(x.shape[axis], start, end), step)


@RULES.rule(aten.narrow_copy.default)
def narrow_copy(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return slice_axis(x, axis, first, first + length)


@RULES.rule(aten.cat.default)
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """All dtypes count; an empty vector is left out whatever the shape of the others, as torch does."""
    dtype = torch_dtype(tensors[0])
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, torch_dtype(tensor))
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or [tensors[0]]
    return jnp.concatenate([cast(part, dtype) for part in parts], axis_of(dim, parts[0].ndim))


@RULES.rule(aten.stack.default, aten._stack.default)
def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    axis = axis_of(dim, tensors[0].ndim + 1)
    return cat([jnp.expand_dims(tensor, axis) for tensor in tensors], axis)


@RULES.rule(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(x: jax.Array, split_sizes: Ints, dim: int = 0) -> Arrays:
    axis = axis_of(dim, x.ndim)
    starts = [sum(split_sizes[:part]) for part in range(len(split_sizes))]
    return tuple(slice_axis(x, axis, s, s + n) for s, n in zip(starts, split_sizes, strict=True))


@RULES.rule(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(x: jax.Array, split_size: int, dim: int = 0) -> Arrays:
    size = x.shape[axis_of(dim, x.ndim)]
    if split_size == 0 or size == 0:
        return (x,)
    starts = range(0, size, split_size)
    return split_with_sizes(x, [min(split_size, size - start) for start in starts], dim)


@RULES.rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(x: jax.Array, dim: int = 0) -> Arrays:
    return tuple(select(x, dim, index) for index in range(x.shape[axis_of(dim, x.ndim)]))


@RULES.rule(aten.repeat.default)
def repeat(x: jax.Array, repeats: Ints) -> jax.Array:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@RULES.rule(aten.flip.default)
def flip(x: jax.Array, dims: Ints) -> jax.Array:
    return lax.rev(x, [axis_of(d, x.ndim) for d in dims]) if x.ndim else x


@RULES.rule(aten.roll.default)
def roll(x: jax.Array, shifts: int | Ints, dims: int | Ints = ()) -> jax.Array:
    steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    if x.size == 0 or x.ndim == 0:
        return x
    return jnp.roll(x, steps, axes) if axes else jnp.roll(x, steps[0])


@RULES.rule(aten.rot90.default)
def rot90(x: jax.Array, k: int = 1, dims: Ints = (0, 1)) -> jax.Array:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@RULES.rule(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(x: jax.Array, size: Ints, stride: Ints, storage_offset: int | None = None) -> jax.Array:
    if math.prod(size) == 0:
        return jnp.zeros(tuple(size), x.dtype)
    return x.reshape(-1).at[strided_positions(size, stride, storage_offset)].get(mode="promise_in_bounds")


@RULES.rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Windows of `size` along one axis; the places inside a window are on a new last axis."""
    if x.ndim == 0:
        return as_vector(x)[:size]
    axis = axis_of(dimension, x.ndim)
    count = (x.shape[axis] - size) // step + 1
    places = step * jnp.arange(count)[:, None] + jnp.arange(size)[None, :]
    windows = x.at[(slice(None),) * axis + (places,)].get(mode="promise_in_bounds")
    return jnp.moveaxis(windows, axis + 1, -1)


@RULES.rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.asarray(jnp.diagonal(x, offset, dim1, dim2))


@RULES.rule(aten.diag_embed.default)
def diag_embed(x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    side = x.shape[-1] + abs(offset)
    row = lax.broadcasted_iota(jnp.int32, (side, side), 0)
    column = lax.broadcasted_iota(jnp.int32, (side, side), 1)
    first, last = max(-offset, 0), x.shape[-1]
    spread = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(first, side - first - last)])
    placed = jnp.where(column - row == offset, spread[..., :, None], jnp.zeros((), x.dtype))
    return jnp.moveaxis(placed, (-2, -1), (axis_of(dim1, x.ndim + 1), axis_of(dim2, x.ndim + 1)))


@RULES.rule(aten.block_diag.default)
def block_diag(tensors: Sequence[jax.Array]) -> jax.Array:
    blocks = [jnp.atleast_2d(tensor) for tensor in tensors]
    width, left = sum(block.shape[1] for block in blocks), 0
    rows = []
    for block in blocks:
        rows.append(jnp.pad(block, [(0, 0), (left, width - left - block.shape[1])]))
        left += block.shape[1]
    return cat(rows)
