"""Softmax and its variants. float16 and bfloat16 are computed in float32 and rounded once, as torch does on the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import gradients as gradients_rules
from dynaxla.bucketing.pad_rules import reductions as reductions_rules
from dynaxla.ops.axes_and_dtypes import axis_of, widen
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.eager_errors import check_dim, check_softmax_dtype
from dynaxla.ops.promotion import cast
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def _along(x: jax.Array, dim: int) -> tuple[int, ...]:
    """The axis of a softmax; none for a 0-d tensor, which is its own row."""
    return (axis_of(dim, x.ndim),) if x.ndim else ()


def _shifted(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x - jnp.max(x, axes, keepdims=True, initial=-jnp.inf)


@OPS.op(aten._softmax.default, check=check_dim, dtypes=FLOATS, pad=reductions_rules.softmax)
def softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    """A row of only -inf gives NaN."""
    axes, wide = _along(x, dim), widen(x)
    weights = jnp.exp(_shifted(wide, axes))
    result = weights / jnp.sum(weights, axes, keepdims=True)
    return result if half_to_float else result.astype(x.dtype)


@OPS.op(aten._log_softmax.default, dtypes=FLOATS, pad=reductions_rules.softmax)
def log_softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    axes, wide = _along(x, dim), widen(x)
    shifted = _shifted(wide, axes)
    result = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axes, keepdims=True))
    return result if half_to_float else result.astype(x.dtype)


@OPS.op(aten._safe_softmax.default, dtypes=FLOATS, pad=reductions_rules.softmax)
def safe_softmax(x: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    """Softmax in which a row of only -inf gives zeros."""
    terms = x if dtype is None else cast(x, dtype)
    masked = jnp.all(x == -jnp.inf, _along(x, dim), keepdims=True)
    return jnp.where(masked, 0, softmax(terms, dim, False))


@OPS.op(
    aten._softmax_backward_data.default, dtypes=FLOATS, check=check_softmax_dtype, pad=gradients_rules.softmax_backward
)
def softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    flow, weights = widen(grad), widen(output)
    total = jnp.sum(flow * weights, _along(output, dim), keepdims=True)
    return cast(weights * (flow - total), input_dtype)


@OPS.op(
    aten._log_softmax_backward_data.default,
    dtypes=FLOATS,
    check=check_softmax_dtype,
    pad=gradients_rules.softmax_backward,
)
def log_softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    flow = widen(grad)
    total = jnp.sum(flow, _along(output, dim), keepdims=True)
    return cast(flow - jnp.exp(widen(output)) * total, input_dtype)
