"""Variances and standard deviations over axes.

float16 and bfloat16 are computed in float32 and rounded once, as torch does on the CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.pad_rules import reductions as reductions_rules
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import axes_of, is_complex, widen
from dynaxla.ops.dtypes import INEXACT
from dynaxla.ops.record import OpFamily
from dynaxla.ops.reductions import Dims, count_along

aten = torch.ops.aten
OPS = OpFamily()


def _moments(x: jax.Array, dim: Dims, correction: float | None, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Variance (real) and mean of `x` in the computation dtype; NaN or infinity if the corrected count is 0 or less."""
    axes, wide = axes_of(dim, x.ndim), widen(x)
    count = count_along(x, axes)
    mean = jnp.sum(wide, axes, keepdims=True) / count
    distance = wide - mean
    squares = jnp.real(distance * jnp.conj(distance)) if is_complex(x) else distance * distance
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = jnp.sum(squares, axes, keepdims=keepdim) / freedom
    return variance, mean if keepdim else jnp.squeeze(mean, axes)


def _rounded(variance: jax.Array, x: jax.Array) -> jax.Array:
    return variance if is_complex(x) else variance.astype(x.dtype)


@OPS.op(aten.var.correction, dtypes=INEXACT, pad=reductions_rules.variance)
def var(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    return _rounded(_moments(x, dim, correction, keepdim)[0], x)


@OPS.op(aten.std.correction, dtypes=INEXACT, pad=reductions_rules.variance)
def std(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    return _rounded(jnp.sqrt(_moments(x, dim, correction, keepdim)[0]), x)


@OPS.op(aten.var_mean.correction, dtypes=INEXACT, pad=reductions_rules.variance)
def var_mean(
    x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return _rounded(variance, x), mean.astype(x.dtype)


@OPS.op(aten.std_mean.correction, dtypes=INEXACT, pad=reductions_rules.variance, as_aten=decompose)
def std_mean(
    x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return _rounded(jnp.sqrt(variance), x), mean.astype(x.dtype)
