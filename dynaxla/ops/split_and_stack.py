"""Concatenation, splits, repetition, flips and rolls."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import indexing as indexing_rules
from dynaxla.bucketing.pad_rules import split_and_stack as split_and_stack_rules
from dynaxla.ops import aten_forms
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import axis_of, slice_axis
from dynaxla.ops.dtypes import STORED
from dynaxla.ops.promotion import cast, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.views import Arrays, Ints, select

aten = torch.ops.aten
OPS = OpFamily()


@OPS.op(aten.cat.default, dtypes=STORED, pad=indexing_rules.concatenate)
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """All operands count for the dtype; an empty 1-d tensor is skipped whatever the other shapes, as in torch."""
    dtype = torch_dtype(tensors[0])
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, torch_dtype(tensor))
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or [tensors[0]]
    return jnp.concatenate([cast(part, dtype) for part in parts], axis_of(dim, parts[0].ndim))


@OPS.op(aten.stack.default, aten._stack.default, dtypes=STORED, pad=split_and_stack_rules.stack)
def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    axis = axis_of(dim, tensors[0].ndim + 1)
    return cat([jnp.expand_dims(tensor, axis) for tensor in tensors], axis)


@OPS.op(
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split_with_sizes.default,
    dtypes=STORED,
    pad=split_and_stack_rules.split,
    as_aten=aten_forms.split_with_sizes,
)
def split_with_sizes(x: jax.Array, split_sizes: Ints, dim: int = 0) -> Arrays:
    axis = axis_of(dim, x.ndim)
    starts = [sum(split_sizes[:part]) for part in range(len(split_sizes))]
    return tuple(slice_axis(x, axis, s, s + n) for s, n in zip(starts, split_sizes, strict=True))


@OPS.op(
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.unsafe_split.Tensor,
    dtypes=STORED,
    pad=split_and_stack_rules.split,
    as_aten=aten_forms.split,
)
def split(x: jax.Array, split_size: int, dim: int = 0) -> Arrays:
    size = x.shape[axis_of(dim, x.ndim)]
    if split_size == 0 or size == 0:
        return (x,)
    starts = range(0, size, split_size)
    return split_with_sizes(x, [min(split_size, size - start) for start in starts], dim)


@OPS.op(
    aten.unbind.int, aten.unbind_copy.int, dtypes=STORED, pad=split_and_stack_rules.unbind, as_aten=aten_forms.unbind
)
def unbind(x: jax.Array, dim: int = 0) -> Arrays:
    return tuple(select(x, dim, index) for index in range(x.shape[axis_of(dim, x.ndim)]))


@OPS.op(aten.repeat.default, dtypes=STORED, pad=split_and_stack_rules.repeat)
def repeat(x: jax.Array, repeats: Ints) -> jax.Array:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@OPS.op(aten.flip.default, pad=indexing_rules.flip)
def flip(x: jax.Array, dims: Ints) -> jax.Array:
    return lax.rev(x, [axis_of(d, x.ndim) for d in dims]) if x.ndim else x


@OPS.op(aten.roll.default, dtypes=STORED, pad=split_and_stack_rules.roll)
def roll(x: jax.Array, shifts: int | Ints, dims: int | Ints = ()) -> jax.Array:
    steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    if x.size == 0 or x.ndim == 0:
        return x
    return jnp.roll(x, steps, axes) if axes else jnp.roll(x, steps[0])


@OPS.op(aten.rot90.default, pad=indexing_rules.rot90)
def rot90(x: jax.Array, k: int = 1, dims: Ints = (0, 1)) -> jax.Array:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@OPS.op(aten.block_diag.default, as_aten=decompose)
def block_diag(tensors: Sequence[jax.Array]) -> jax.Array:
    blocks = [jnp.atleast_2d(tensor) for tensor in tensors]
    width, left = sum(block.shape[1] for block in blocks), 0
    rows = []
    for block in blocks:
        rows.append(jnp.pad(block, [(0, 0), (left, width - left - block.shape[1])]))
        left += block.shape[1]
    return cat(rows)
