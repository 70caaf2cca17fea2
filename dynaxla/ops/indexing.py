"""Reads by index and by mask.

torch raises for an index out of range. XLA programs cannot: such a read gives some element of the tensor, and such a
write is dropped. Negative indices count from the end where they do in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.bucketing.pad_rules import indexing as indexing_rules
from dynaxla.bucketing.pad_rules import scattering as scattering_rules
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.axes_and_dtypes import Scalar, as_vector, axis_of, constant
from dynaxla.ops.cumulative import running_sum
from dynaxla.ops.dtypes import STORED
from dynaxla.ops.eager_errors import check_all, check_numbers_fit, reason_no_places
from dynaxla.ops.insertion_points import insertion_points
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()
MASK_DTYPES = (torch.bool, torch.uint8)
OUT_OF_RANGE_READ = "an index out of range reads some element of the tensor where values are not checked"
NO_MASK = "no boolean masks; " + OUT_OF_RANGE_READ


def check_index(node: torch.fx.Node) -> str | None:
    """Refuses an index dtype for which torch raises; most ops take int64 only."""
    short_too = node.target in (aten.index_select.default, aten.index_add.default)
    dtype = tensor_of(node, "index").dtype
    return None if dtype == torch.int64 or (short_too and dtype == torch.int32) else f"an index of {dtype}"


def check_mask(node: torch.fx.Node) -> str | None:
    """Refuses a mask that is not boolean."""
    dtype = tensor_of(node, "mask").dtype
    return None if dtype == torch.bool else f"a mask of {dtype}"


def check_no_mask(node: torch.fx.Node) -> str | None:
    """Refuses a boolean mask as an index."""
    if any(index.dtype in MASK_DTYPES for _, index in indices_of(node)):
        return "a boolean mask as an index gives a size that depends on the data"
    return None


def indices_of(node: torch.fx.Node) -> list[tuple[int, torch.Tensor]]:
    return [
        (place, index.meta["val"])
        for place, index in enumerate(argument(node, "indices"))
        if isinstance(index, torch.fx.Node)
    ]


def check_places(node: torch.fx.Node) -> str | None:
    """Refuses reads along a dim that has no places."""
    sizes, indices = tensor_of(node, "self").shape, indices_of(node)
    return reason_no_places([sizes[place] for place, _ in indices], [index for _, index in indices])


def check_places_of_dim(node: torch.fx.Node) -> str | None:
    """Refuses reads at an index along a dim that has no places."""
    sizes, dim = tensor_of(node, "self").shape, argument(node, "dim")
    return reason_no_places([sizes[dim]] if sizes else [], [tensor_of(node, "index")])


def check_output_size(node: torch.fx.Node) -> str | None:
    """Refuses repeat_interleave without `output_size`."""
    if argument(node, "output_size") is None:
        return "without output_size the size of the result depends on the data"
    return None


Indices = Sequence[jax.Array | None]


def as_subscript(indices: Indices) -> tuple[jax.Array | slice, ...]:
    """Converts a torch index list to a subscript of an array; None means the whole axis."""
    return tuple(slice(None) if index is None else index for index in indices)


def subscript_of_axis(axis: int, index: jax.Array) -> tuple[jax.Array | slice, ...]:
    """The subscript with `index` on one axis and full slices on the others."""
    return (slice(None),) * axis + (index,)


@OPS.op(aten.gather.default, pad=indexing_rules.gather, limits=OUT_OF_RANGE_READ)
def gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    axis = axis_of(dim, x.ndim)
    source, where = as_vector(x), as_vector(index)
    ends = [n if a == axis else where.shape[a] for a, n in enumerate(source.shape)]
    window = lax.slice(source, [0] * source.ndim, ends)
    return jnp.take_along_axis(window, where, axis, mode="promise_in_bounds").reshape(index.shape)


@OPS.op(
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    dtypes=STORED,
    check=check_all(check_no_mask, check_places),
    pad=indexing_rules.index,
    limits=NO_MASK,
)
def index(x: jax.Array, indices: Indices) -> jax.Array:
    return x.at[as_subscript(indices)].get(mode="promise_in_bounds")


def clamp_indices(x: jax.Array, indices: Indices) -> list[jax.Array | None]:
    """Clamps each index to its axis, from -size to size - 1, as the masked index ops define."""
    return [i if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


@OPS.op(aten._unsafe_masked_index.default, limits=OUT_OF_RANGE_READ)
def masked_index(x: jax.Array, mask: jax.Array, indices: Indices, fill: Scalar) -> jax.Array:
    if x.size == 0:  # nothing can be read; elements of the result are `fill`
        x = jnp.zeros([max(n, 1) for n in x.shape], x.dtype)
        mask = jnp.zeros_like(mask)
    taken = index(x, clamp_indices(x, indices))
    return jnp.where(mask, taken, constant(fill, x.dtype))


@OPS.op(
    aten.index_select.default,
    dtypes=STORED,
    check=check_all(check_index, check_places_of_dim),
    pad=indexing_rules.index_select,
    limits=OUT_OF_RANGE_READ,
)
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.ndim == 0:
        return x
    where = subscript_of_axis(axis_of(dim, x.ndim), as_vector(index))
    return x.at[where].get(mode="promise_in_bounds")


@OPS.op(aten.take.default, limits=OUT_OF_RANGE_READ)
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    return x.reshape(-1).at[index].get(mode="promise_in_bounds")


@OPS.op(aten.masked_fill.Scalar, check=check_numbers_fit("value"), pad=elementwise_rules.elementwise)
def masked_fill_scalar(x: jax.Array, mask: jax.Array, value: Scalar) -> jax.Array:
    return jnp.where(mask, constant(value, x.dtype), x)


@OPS.op(aten.masked_fill.Tensor, pad=elementwise_rules.elementwise)
def masked_fill_tensor(x: jax.Array, mask: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(mask, value.astype(x.dtype), x)


@OPS.op(
    aten.masked_scatter.default,
    check=check_mask,
    pad=scattering_rules.masked_scatter,
    limits="a source with too few elements is not detected where values are not checked",
)
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The True elements of `mask`, in order, get the elements of `source`; torch raises if these are too few."""
    base, chosen = jnp.broadcast_arrays(x, mask.astype(bool))
    if source.size == 0 or base.size == 0:
        return base
    rank = running_sum(chosen.reshape(-1).astype(jnp.int64), 0) - 1
    values = source.reshape(-1).at[jnp.maximum(rank, 0)].get(mode="promise_in_bounds")
    return jnp.where(chosen, values.reshape(base.shape), base)


@OPS.op(aten.masked_scatter_backward.default, pad=scattering_rules.masked_scatter_backward)
def masked_scatter_backward(grad_output: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The elements of the gradient where `mask` is True, in order, followed by zeros."""
    grads, chosen = (x.reshape(-1) for x in jnp.broadcast_arrays(grad_output, mask.astype(bool)))
    count = math.prod(sizes)
    places = jnp.where(chosen, running_sum(chosen.astype(jnp.int64), 0) - 1, count)
    return jnp.zeros(count, grads.dtype).at[places].set(grads, mode="drop").reshape(tuple(sizes))


@OPS.op(aten.nonzero_static.default, pad=indexing_rules.nonzero_static)
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if x.size == 0:  # jnp.nonzero ignores the fill value for an empty array
        return jnp.full((size, x.ndim), fill_value, jnp.int64)
    found = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(found, axis=1).astype(jnp.int64)


@OPS.op(aten.repeat_interleave.Tensor, check=check_output_size, limits="only with output_size")
def repeat_interleave(repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    """`output_size` is the sum of `repeats`; without it the result's size would depend on data."""
    if output_size is None:
        raise ValueError("repeat_interleave needs output_size")
    ends = running_sum(repeats.astype(jnp.int64), 0)
    return insertion_points(ends, jnp.arange(output_size, dtype=jnp.int64), right=True).astype(repeats.dtype)


@OPS.op(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **_: object) -> jax.Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col))).astype(JNP_DTYPES[dtype])


@OPS.op(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **_: object) -> jax.Array:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col))).astype(JNP_DTYPES[dtype])
