"""Writes by index: copies of a tensor with some elements replaced or accumulated.

If several values have one index and the op does not reduce them, neither torch nor XLA defines which one is written. A
write with an index out of range, for which torch raises, is dropped where values are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import scattering as scattering_rules
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.axes_and_dtypes import (
    Scalar,
    as_vector,
    axis_of,
    constant,
    highest_value,
    is_complex,
    is_float,
    lowest_value,
    widen,
)
from dynaxla.ops.eager_errors import check_all, check_numbers_fit, check_source_dtype
from dynaxla.ops.indexing import (
    MASK_DTYPES,
    Indices,
    as_subscript,
    check_index,
    clamp_indices,
    indices_of,
    subscript_of_axis,
)
from dynaxla.ops.record import OpFamily
from dynaxla.torch_api.symbols import example, expression

aten = torch.ops.aten
OPS = OpFamily()
OUT_OF_RANGE_WRITE = "an index out of range is dropped where values are not checked"


def check_mask_of_one_value(node: torch.fx.Node) -> str | None:
    """Refuses a boolean mask unless it is the only index and a single value is written."""
    indices = indices_of(node)
    masks = [(place, index) for place, index in indices if index.dtype in MASK_DTYPES]
    if not masks:
        return None
    if len(indices) > 1:
        return "a boolean mask beside another index"
    x, values = tensor_of(node, "self"), tensor_of(node, "values")
    place, mask = masks[0]
    under = x.ndim - place - mask.ndim  # number of axes after those under the mask
    if values.ndim > under and expression(values.shape[values.ndim - under - 1]) != 1:
        return "one value per True of the mask: their number depends on the data"
    return None


Places = jax.Array | tuple[jax.Array | slice, ...]
"""A subscript of `x.at[...]`."""

METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}
BOOL_METHODS = {"sum": "max", "prod": "min", "amax": "max", "amin": "min"}
OLD_NAMES = {"add": "sum", "multiply": "prod"}


def combine_into(x: jax.Array, where: Places, values: jax.Array, reduce: str) -> jax.Array:
    """`x` with `values` combined into `x[where]`; 16-bit floats are added and multiplied in float32."""
    method = (BOOL_METHODS if x.dtype == jnp.bool_ else METHODS)[reduce]
    wide = x if reduce in ("amax", "amin") else widen(x)
    combined = getattr(wide.at[where], method)(values.astype(wide.dtype), mode="promise_in_bounds")
    return jnp.asarray(combined).astype(x.dtype)


def reduce_into(x: jax.Array, where: Places, values: jax.Array, reduce: str, include_self: bool) -> jax.Array:
    """`combine_into` for all reductions of torch, with `include_self`."""
    base = widen(x)
    if not include_self:
        written = jnp.zeros(x.shape, bool).at[where].set(True, mode="promise_in_bounds")
        base = jnp.where(written, identity_of(reduce, base), base)
    combined = combine_into(base, where, values, reduce)
    if reduce != "mean":
        return combined.astype(x.dtype)
    counts = jnp.full(x.shape, int(include_self), jnp.int64).at[where].add(1, mode="promise_in_bounds")
    divisor = jnp.maximum(counts, 1).astype(combined.dtype)
    exact = is_float(combined) or is_complex(combined)
    return (combined / divisor if exact else jnp.floor_divide(combined, divisor)).astype(x.dtype)


def identity_of(reduce: str, x: jax.Array) -> jax.Array:
    """The identity of the reduction, in the dtype of `x`."""
    if reduce == "amax":
        return lowest_value(x.dtype)
    if reduce == "amin":
        return highest_value(x.dtype)
    return constant(1 if reduce == "prod" else 0, x.dtype)


def scatter_points(dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """One subscript per axis: `index` on its own axis, and every element's own position on the others."""
    axis = axis_of(dim, index.ndim)
    return tuple(index if a == axis else lax.broadcasted_iota(index.dtype, index.shape, a) for a in range(index.ndim))


def crop_source(source: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The front of `source` on every axis, of the index's sizes, which is all that scatter reads."""
    return lax.slice(source, [0] * len(shape), list(shape))


@OPS.op(aten.scatter.src, pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE)
def scatter_src(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    if index.size == 0:
        return x
    where = as_vector(index)
    values = crop_source(as_vector(src), where.shape)
    written = as_vector(x).at[scatter_points(dim, where)].set(values, mode="promise_in_bounds")
    return written.reshape(x.shape)


@OPS.op(aten.scatter.value, check=check_numbers_fit("value"), pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE)
def scatter_value(x: jax.Array, dim: int, index: jax.Array, value: Scalar) -> jax.Array:
    return scatter_src(x, dim, index, jnp.full(index.shape, constant(value, x.dtype)))


@OPS.op(aten.scatter_reduce.two, pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE)
def scatter_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    if index.size == 0:
        return x
    where = as_vector(index)
    values = crop_source(as_vector(src), where.shape)
    combined = reduce_into(as_vector(x), scatter_points(dim, where), values, reduce, include_self)
    return combined.reshape(x.shape)


@OPS.op(aten.scatter_add.default, pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE)
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return scatter_reduce(x, dim, index, src, "sum")


@OPS.op(aten.scatter.reduce, pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE)
def scatter_src_reduce(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str) -> jax.Array:
    return scatter_reduce(x, dim, index, src, OLD_NAMES[reduce])


@OPS.op(
    aten.scatter.value_reduce, check=check_numbers_fit("value"), pad=scattering_rules.scatter, limits=OUT_OF_RANGE_WRITE
)
def scatter_value_reduce(x: jax.Array, dim: int, index: jax.Array, value: Scalar, *, reduce: str) -> jax.Array:
    return scatter_reduce(x, dim, index, jnp.full(index.shape, constant(value, x.dtype)), OLD_NAMES[reduce])


def check_indexed_dims(node: torch.fx.Node) -> str | None:
    """Refuses more indices than the tensor has dims, and masks of other sizes than the dims under them."""
    sizes, place = [example(size) for size in tensor_of(node, "self").shape], 0
    for index in argument(node, "indices"):
        if index is None or index.meta["val"].dtype not in MASK_DTYPES:
            place += 1
            continue
        found = [example(size) for size in index.meta["val"].shape]
        under = sizes[place : place + len(found)]
        if None not in (*found, *under) and found != under:
            return f"a mask of {found} for dims of {under}"
        place += len(found)
    return f"indices of {place} dims of a tensor of {len(sizes)}" if place > len(sizes) else None


@OPS.op(
    aten.index_put.default,
    check=check_all(check_mask_of_one_value, check_source_dtype("values"), check_indexed_dims),
    pad=scattering_rules.index_put,
    limits="a boolean mask only alone and with one value; " + OUT_OF_RANGE_WRITE,
)
@OPS.op(
    aten._unsafe_index_put.default,
    check=check_all(check_mask_of_one_value, check_indexed_dims),
    pad=scattering_rules.index_put,
    limits="a boolean mask only alone and with one value; " + OUT_OF_RANGE_WRITE,
)
def index_put(x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool = False) -> jax.Array:
    """A boolean mask is supported only alone and with a single value; otherwise sizes would depend on data."""
    for position, index in enumerate(indices):
        if index is not None and index.dtype in (jnp.bool_, jnp.uint8):
            return put_where(x, index.astype(bool), position, values, accumulate)
    where = as_subscript(indices)
    if accumulate:
        return combine_into(x, where, values, "sum")
    return x.at[where].set(values, mode="promise_in_bounds")


def put_where(x: jax.Array, mask: jax.Array, position: int, values: jax.Array, accumulate: bool) -> jax.Array:
    """`x` with `values` where `mask`, which covers the axes from `position` on, is True.

    `values` has one axis of size 1 for all axes under the mask, or fewer axes.
    """
    last = x.ndim - position - mask.ndim
    mask = mask.reshape((1,) * position + mask.shape + (1,) * last)
    if values.ndim > last:
        split = values.ndim - last
        values = values.reshape(values.shape[: split - 1] + (1,) * (mask.ndim - position - last) + values.shape[split:])
    if accumulate:
        return jnp.where(mask, x | values if x.dtype == jnp.bool_ else x + values, x)
    return jnp.where(mask, values, x)


@OPS.op(aten._unsafe_masked_index_put_accumulate.default, limits=OUT_OF_RANGE_WRITE)
def masked_index_put(x: jax.Array, mask: jax.Array, indices: Indices, values: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    chosen = jnp.where(mask, values, constant(0, values.dtype))
    return index_put(x, clamp_indices(x, indices), chosen, True)


def check_source(node: torch.fx.Node) -> str | None:
    """Refuses a source that would have to be broadcast along the other dims."""
    x, source, dim = tensor_of(node, "self"), tensor_of(node, "source"), argument(node, "dim")
    if not x.ndim or not source.ndim:
        return None
    others = [[size for axis, size in enumerate(each.shape) if axis != dim % x.ndim] for each in (x, source)]
    return None if others[0] == others[1] else "a source of another shape"


@OPS.op(
    aten.index_add.default,
    check=check_all(check_index, check_source, check_source_dtype("source")),
    pad=scattering_rules.scatter,
    limits=OUT_OF_RANGE_WRITE,
)
def index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Scalar = 1) -> jax.Array:
    values = as_vector(source)
    scaled = values if alpha == 1 else values * constant(alpha, x.dtype)
    where = subscript_of_axis(axis_of(dim, x.ndim), as_vector(index))
    return combine_into(as_vector(x), where, scaled, "sum").reshape(x.shape)


@OPS.op(
    aten.index_copy.default,
    check=check_all(check_index, check_source_dtype("source")),
    pad=scattering_rules.scatter,
    limits=OUT_OF_RANGE_WRITE,
)
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    where = subscript_of_axis(axis_of(dim, x.ndim), as_vector(index))
    return as_vector(x).at[where].set(as_vector(source), mode="promise_in_bounds").reshape(x.shape)


@OPS.op(
    aten.index_fill.int_Scalar,
    check=check_all(check_index, check_numbers_fit("value")),
    pad=scattering_rules.scatter,
    limits=OUT_OF_RANGE_WRITE,
)
def index_fill_scalar(x: jax.Array, dim: int, index: jax.Array, value: Scalar) -> jax.Array:
    return index_fill_tensor(x, dim, index, constant(value, x.dtype))


def check_filling(node: torch.fx.Node) -> str | None:
    """Refuses to fill a real tensor with a complex number."""
    x, value = tensor_of(node, "self"), tensor_of(node, "value")
    return f"a value of {value.dtype}" if value.is_complex() and not x.is_complex() else None


@OPS.op(
    aten.index_fill.int_Tensor,
    check=check_all(check_index, check_filling),
    pad=scattering_rules.scatter,
    limits=OUT_OF_RANGE_WRITE,
)
def index_fill_tensor(x: jax.Array, dim: int, index: jax.Array, value: jax.Array) -> jax.Array:
    where = subscript_of_axis(axis_of(dim, x.ndim), as_vector(index))
    filled = as_vector(x).at[where].set(value.astype(x.dtype), mode="promise_in_bounds")
    return filled.reshape(x.shape)


@OPS.op(
    aten.index_reduce.default,
    check=check_source_dtype("source"),
    pad=scattering_rules.scatter,
    limits=OUT_OF_RANGE_WRITE,
)
def index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    where = subscript_of_axis(axis_of(dim, x.ndim), as_vector(index))
    return reduce_into(as_vector(x), where, as_vector(source), reduce, include_self).reshape(x.shape)


@OPS.op(aten.put.default, check=check_all(check_index, check_source_dtype("source")), limits=OUT_OF_RANGE_WRITE)
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    flat, where, values = x.reshape(-1), index.reshape(-1), source.reshape(-1)
    if accumulate:
        return combine_into(flat, where, values, "sum").reshape(x.shape)
    return flat.at[where].set(values, mode="promise_in_bounds").reshape(x.shape)
