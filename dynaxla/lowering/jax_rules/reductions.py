"""Reductions over axes, and the softmax family.

float16 and bfloat16 are summed in float32 and rounded once, as torch does on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from dynaxla.lowering.jax_rules.axes_and_dtypes import axes_of, axis_of, is_complex, is_float, widened
from dynaxla.lowering.jax_rules.promotion import cast, inexact_dtype, torch_dtype
from dynaxla.lowering.jax_rules.rule_set import RuleSet

aten = torch.ops.aten
RULES = RuleSet()

Dims = int | Sequence[int] | None


def as_terms(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """`x` in the dtype a sum of it has: the one asked for, else int64 for integers and bool, else its own."""
    if dtype is not None:
        return cast(x, dtype)
    own = torch_dtype(x)
    return x if own.is_floating_point or own.is_complex else x.astype(jnp.int64)


@RULES.rule(aten.sum.dim_IntList)
def sum_dims(x: jax.Array, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    if dtype == torch.bool:
        return jnp.any(terms, axes, keepdims=keepdim)
    return jnp.sum(widened(terms), axes, keepdims=keepdim).astype(terms.dtype)


@RULES.rule(aten.sum.default)
def sum_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return sum_dims(x, None, dtype=dtype)


@RULES.rule(aten.trace.default)
def trace(x: jax.Array) -> jax.Array:
    return sum_all(jnp.diagonal(x))


@RULES.rule(aten.nansum.default)
def nansum(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    numbers = jnp.where(jnp.isnan(x), 0, x) if is_float(x) else x
    return sum_dims(numbers, dim, keepdim, dtype=dtype)


@RULES.rule(aten.mean.dim)
def mean_dims(x: jax.Array, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    total = jnp.sum(widened(terms), axes, keepdims=keepdim)
    return (total / count_along(x, axes)).astype(terms.dtype)


def count_along(x: jax.Array, axes: Sequence[int]) -> int:
    """How many elements one result of a reduction over `axes` is made of."""
    return math.prod(x.shape[axis] for axis in axes)


@RULES.rule(aten.mean.default)
def mean_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return mean_dims(x, None, dtype=dtype)


def _product(x: jax.Array, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> jax.Array:
    terms, axes = as_terms(x, dtype), axes_of(dim, x.ndim)
    if dtype == torch.bool:
        return jnp.all(terms, axes, keepdims=keepdim)
    return jnp.prod(widened(terms), axes, keepdims=keepdim).astype(terms.dtype)


@RULES.rule(aten.prod.dim_int)
def prod_dim(x: jax.Array, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _product(x, dim, keepdim, dtype)


@RULES.rule(aten.prod.default)
def prod_all(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _product(x, None, False, dtype)


@RULES.rule(aten.amax.default)
def amax(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """NaN if there is one; torch refuses an empty axis."""
    axes = axes_of(dim, x.ndim)
    return _nan_if_any(jnp.max(x, axes, keepdims=keepdim), x, axes)


@RULES.rule(aten.amin.default)
def amin(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """NaN if there is one; torch refuses an empty axis."""
    axes = axes_of(dim, x.ndim)
    return _nan_if_any(jnp.min(x, axes, keepdims=keepdim), x, axes)


def _nan_if_any(extreme: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """XLA's CPU kernel for the extremes of thousands of elements loses NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    found = jnp.any(jnp.isnan(x), axes).reshape(extreme.shape)
    return jnp.where(found, jnp.asarray(jnp.nan, x.dtype), extreme)


RULES.rule(aten.max.default)(lambda x: amax(x))
RULES.rule(aten.min.default)(lambda x: amin(x))


def _truth(found: jax.Array, x: jax.Array) -> jax.Array:
    """any and all give uint8 for uint8 and bool for the rest."""
    return found.astype(jnp.uint8) if x.dtype == jnp.uint8 else found


@RULES.rule(aten.any.dims)
def any_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """With an empty list nothing is reduced, unlike in the other reductions."""
    axes = () if isinstance(dim, Sequence) and not dim else axes_of(dim, x.ndim)
    return _truth(jnp.any(x != 0, axes, keepdims=keepdim), x)


@RULES.rule(aten.all.dims)
def all_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """With an empty list nothing is reduced, unlike in the other reductions."""
    axes = () if isinstance(dim, Sequence) and not dim else axes_of(dim, x.ndim)
    return _truth(jnp.all(x != 0, axes, keepdims=keepdim), x)


RULES.rule(aten.any.default)(lambda x: any_dims(x))
RULES.rule(aten.any.dim)(lambda x, dim, keepdim=False: any_dims(x, dim, keepdim))
RULES.rule(aten.all.default)(lambda x: all_dims(x))
RULES.rule(aten.all.dim)(lambda x, dim, keepdim=False: all_dims(x, dim, keepdim))


def _moments(x: jax.Array, dim: Dims, correction: float | None, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Variance (real) and mean of `x` in the dtype they are computed in; no element is left: NaN or infinity."""
    axes, wide = axes_of(dim, x.ndim), widened(x)
    count = count_along(x, axes)
    mean = jnp.sum(wide, axes, keepdims=True) / count
    distance = wide - mean
    squares = jnp.real(distance * jnp.conj(distance)) if is_complex(x) else distance * distance
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = jnp.sum(squares, axes, keepdims=keepdim) / freedom
    return variance, mean if keepdim else jnp.squeeze(mean, axes)


def _rounded(variance: jax.Array, x: jax.Array) -> jax.Array:
    return variance if is_complex(x) else variance.astype(x.dtype)


@RULES.rule(aten.var.correction)
def var(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    return _rounded(_moments(x, dim, correction, keepdim)[0], x)


@RULES.rule(aten.std.correction)
def std(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    return _rounded(jnp.sqrt(_moments(x, dim, correction, keepdim)[0]), x)


@RULES.rule(aten.var_mean.correction)
def var_mean(
    x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return _rounded(variance, x), mean.astype(x.dtype)


@RULES.rule(aten.std_mean.correction)
def std_mean(
    x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return _rounded(jnp.sqrt(variance), x), mean.astype(x.dtype)


@RULES.rule(aten.logsumexp.default)
def logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    terms = cast(x, inexact_dtype(torch_dtype(x)))
    wide, axes = widened(terms), axes_of(dim, x.ndim)
    top = jnp.max(jnp.real(wide), axes, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isinf(top), 0, top)
    total = jnp.log(jnp.sum(jnp.exp(wide - top), axes, keepdims=keepdim))
    return (total + (top if keepdim else jnp.squeeze(top, axes))).astype(terms.dtype)


@RULES.rule(aten.linalg_vector_norm.default)
def vector_norm(
    x: jax.Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    terms = x if dtype is None else cast(x, dtype)
    size = jnp.abs(widened(terms))
    return _norm_of(size, float(ord), axes_of(dim, x.ndim), keepdim).astype(jnp.real(terms).dtype)


def _norm_of(size: jax.Array, order: float, axes: tuple[int, ...], keepdim: bool) -> jax.Array:
    if order == 0:
        return jnp.sum(size != 0, axes, size.dtype, keepdims=keepdim)
    if math.isinf(order) and order < 0:
        return _nan_if_any(jnp.min(size, axes, keepdims=keepdim), size, axes)
    if math.isinf(order):
        return _nan_if_any(jnp.max(size, axes, keepdims=keepdim, initial=0), size, axes)
    if order == 1:
        return jnp.sum(size, axes, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axes, keepdims=keepdim))
    return jnp.sum(size**order, axes, keepdims=keepdim) ** (1 / order)


def _order(p: float | None) -> float:
    return 2 if p is None else p


RULES.rule(aten.norm.Scalar)(lambda x, p=2: vector_norm(x, p))
RULES.rule(aten.norm.ScalarOpt_dim)(lambda x, p, dim, keepdim=False: vector_norm(x, _order(p), dim, keepdim))
RULES.rule(aten.norm.ScalarOpt_dtype)(lambda x, p, *, dtype: vector_norm(x, _order(p), dtype=dtype))
RULES.rule(aten.norm.ScalarOpt_dim_dtype)(
    lambda x, p, dim, keepdim, *, dtype: vector_norm(x, _order(p), dim, keepdim, dtype=dtype)
)


@RULES.rule(aten.dist.default)
def dist(x: jax.Array, other: jax.Array, p: float = 2) -> jax.Array:
    both = inexact_dtype(torch.promote_types(torch_dtype(x), torch_dtype(other)))
    return vector_norm(cast(x, both) - cast(other, both), p)


@RULES.rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(x: jax.Array, dim: Dims = None) -> jax.Array:
    return jnp.sum(x != 0, axes_of(dim, x.ndim), jnp.int64)


def _along(x: jax.Array, dim: int) -> tuple[int, ...]:
    """The one axis of a softmax; a scalar has none, and is its own row."""
    return (axis_of(dim, x.ndim),) if x.ndim else ()


def _shifted(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x - jnp.max(x, axes, keepdims=True, initial=-jnp.inf)


@RULES.rule(aten._softmax.default)
def softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    """A row of -inf alone gives NaN."""
    axes, wide = _along(x, dim), widened(x)
    weights = jnp.exp(_shifted(wide, axes))
    result = weights / jnp.sum(weights, axes, keepdims=True)
    return result if half_to_float else result.astype(x.dtype)


@RULES.rule(aten._log_softmax.default)
def log_softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    axes, wide = _along(x, dim), widened(x)
    shifted = _shifted(wide, axes)
    result = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axes, keepdims=True))
    return result if half_to_float else result.astype(x.dtype)


@RULES.rule(aten._safe_softmax.default)
def safe_softmax(x: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    """Softmax in which a row of -inf alone gives zeros."""
    terms = x if dtype is None else cast(x, dtype)
    masked = jnp.all(x == -jnp.inf, _along(x, dim), keepdims=True)
    return jnp.where(masked, 0, softmax(terms, dim, False))


@RULES.rule(aten._softmax_backward_data.default)
def softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    flow, weights = widened(grad), widened(output)
    total = jnp.sum(flow * weights, _along(output, dim), keepdims=True)
    return cast(weights * (flow - total), input_dtype)


@RULES.rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    flow = widened(grad)
    total = jnp.sum(flow, _along(output, dim), keepdims=True)
    return cast(flow - jnp.exp(widened(output)) * total, input_dtype)
