"""Reductions over axes.

float16 and bfloat16 are summed in float32 and rounded once, as torch does on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import diagonals as diagonals_rules
from dynaxla.bucketing.pad_rules import reductions as reductions_rules
from dynaxla.ops import aten_forms
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import axes_of, is_float, widen
from dynaxla.ops.dtypes import NUMBERS, REAL
from dynaxla.ops.eager_errors import check_has_elements
from dynaxla.ops.promotion import cast, inexact_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

Dims = int | Sequence[int] | None


def as_terms(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """`x` in the dtype of its sum: the requested dtype, else int64 for integers and bool, else its own."""
    if dtype is not None:
        return cast(x, dtype)
    own = torch_dtype(x)
    return x if own.is_floating_point or own.is_complex else x.astype(jnp.int64)


@OPS.op(aten.sum.dim_IntList, pad=reductions_rules.reduction)
def sum_dims(x: jax.Array, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    if dtype == torch.bool:
        return jnp.any(terms, axes, keepdims=keepdim)
    return jnp.sum(widen(terms), axes, keepdims=keepdim).astype(terms.dtype)


@OPS.op(aten.sum.default, pad=reductions_rules.reduction)
def sum_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return sum_dims(x, None, dtype=dtype)


@OPS.op(aten.trace.default, dtypes=NUMBERS, pad=diagonals_rules.trace)
def trace(x: jax.Array) -> jax.Array:
    return sum_all(jnp.diagonal(x))


@OPS.op(aten.nansum.default, dtypes=REAL, pad=reductions_rules.reduction, as_aten=decompose)
def nansum(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    numbers = jnp.where(jnp.isnan(x), 0, x) if is_float(x) else x
    return sum_dims(numbers, dim, keepdim, dtype=dtype)


@OPS.op(aten.mean.dim, pad=reductions_rules.mean)
def mean_dims(x: jax.Array, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    total = jnp.sum(widen(terms), axes, keepdims=keepdim)
    return (total / count_along(x, axes)).astype(terms.dtype)


def count_along(x: jax.Array, axes: Sequence[int]) -> int:
    """The number of elements per result of a reduction over `axes`."""
    return math.prod(x.shape[axis] for axis in axes)


@OPS.op(aten.mean.default, pad=reductions_rules.mean)
def mean_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return mean_dims(x, None, dtype=dtype)


def _product(x: jax.Array, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    if dtype == torch.bool:
        return jnp.all(terms, axes, keepdims=keepdim)
    return jnp.prod(widen(terms), axes, keepdims=keepdim).astype(terms.dtype)


@OPS.op(aten.prod.dim_int, pad=reductions_rules.reduction)
def prod_dim(x: jax.Array, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _product(x, dim, keepdim, dtype)


@OPS.op(aten.prod.default, pad=reductions_rules.reduction)
def prod_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _product(x, None, False, dtype)


@OPS.op(aten.amax.default, dtypes=REAL, pad=reductions_rules.reduction)
def amax(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """NaN if there is one; torch refuses an empty axis."""
    axes = axes_of(dim, x.ndim)
    return restore_nan(jnp.max(x, axes, keepdims=keepdim), x, axes)


@OPS.op(aten.amin.default, dtypes=REAL, pad=reductions_rules.reduction)
def amin(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """NaN if there is one; torch refuses an empty axis."""
    axes = axes_of(dim, x.ndim)
    return restore_nan(jnp.min(x, axes, keepdims=keepdim), x, axes)


def restore_nan(extreme: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Restores NaN, which XLA's CPU kernel loses in extremes of thousands of elements."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    found = jnp.any(jnp.isnan(x), axes).reshape(extreme.shape)
    return jnp.where(found, jnp.asarray(jnp.nan, x.dtype), extreme)


_extreme_of_all = partial(OPS.op, check=check_has_elements, dtypes=REAL, pad=reductions_rules.reduction)
_extreme_of_all(aten.max.default, as_aten=aten_forms.max_of_all)(lambda x: amax(x))
_extreme_of_all(aten.min.default, as_aten=aten_forms.min_of_all)(lambda x: amin(x))


def _truth(found: jax.Array, x: jax.Array) -> jax.Array:
    """The result dtype of any and all: uint8 for uint8, else bool."""
    return found.astype(jnp.uint8) if x.dtype == jnp.uint8 else found


@OPS.op(aten.any.dims, pad=reductions_rules.reduction, as_aten=decompose)
def any_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """With an empty list nothing is reduced, unlike in the other reductions."""
    axes = () if isinstance(dim, Sequence) and not dim else axes_of(dim, x.ndim)
    return _truth(jnp.any(x != 0, axes, keepdims=keepdim), x)


@OPS.op(aten.all.dims, pad=reductions_rules.reduction, as_aten=decompose)
def all_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """With an empty list nothing is reduced, unlike in the other reductions."""
    axes = () if isinstance(dim, Sequence) and not dim else axes_of(dim, x.ndim)
    return _truth(jnp.all(x != 0, axes, keepdims=keepdim), x)


OPS.op(aten.any.default, pad=reductions_rules.reduction)(lambda x: any_dims(x))
OPS.op(aten.any.dim, pad=reductions_rules.reduction)(lambda x, dim, keepdim=False: any_dims(x, dim, keepdim))
OPS.op(aten.all.default, pad=reductions_rules.reduction)(lambda x: all_dims(x))
OPS.op(aten.all.dim, pad=reductions_rules.reduction)(lambda x, dim, keepdim=False: all_dims(x, dim, keepdim))


@OPS.op(aten.logsumexp.default, pad=reductions_rules.reduction, as_aten=decompose)
def logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    terms = cast(x, inexact_dtype(torch_dtype(x)))
    wide, axes = widen(terms), axes_of(dim, x.ndim)
    top = jnp.max(jnp.real(wide), axes, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isinf(top), 0, top)
    total = jnp.log(jnp.sum(jnp.exp(wide - top), axes, keepdims=keepdim))
    return (total + (top if keepdim else jnp.squeeze(top, axes))).astype(terms.dtype)


@OPS.op(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, pad=reductions_rules.reduction)
def count_nonzero(x: jax.Array, dim: Dims = None) -> jax.Array:
    return jnp.sum(x != 0, axes_of(dim, x.ndim), jnp.int64)
