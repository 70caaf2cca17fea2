"""Normalization layers. Statistics are computed in float32 for the 16-bit floats, and given so: torch's kernels of GPUs keep
them so, those of the CPU round them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.bucketing.pad_rules import normalization as normalization_rules
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import FLOATS, INEXACT
from dynaxla.ops.eager_errors import check_parameters
from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

OPS = OpFamily()
aten = torch.ops.aten


@OPS.op(aten.native_layer_norm.default, dtypes=FLOATS, check=check_parameters, pad=normalization_rules.layer_norm)
def native_layer_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Returns (output, mean, 1 / standard deviation); the last two have size 1 in the normalized dims."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(x)
    mean, rstd = _moments(wide, axes, eps)
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    return y.astype(x.dtype), mean, rstd


@OPS.op(aten._fused_rms_norm.default, dtypes=INEXACT, pad=normalization_rules.layer_norm, as_aten=decompose)
def fused_rms_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(x)
    epsilon = torch.finfo(torch_dtype(wide)).eps if eps is None else eps
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + epsilon)
    y = wide * rstd
    if weight is not None:
        y = y * _wide(weight)
    return y.astype(x.dtype), rstd


@OPS.op(aten.native_group_norm.default, dtypes=FLOATS, check=check_parameters, pad=normalization_rules.group_norm)
def native_group_norm(
    x: Array, weight: Array | None, bias: Array | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Array, Array, Array]:
    """x [N, C, ...]; returns (output, mean [N, group], 1 / standard deviation [N, group])."""
    wide = _wide(x).reshape(N, group, C // group, HxW)
    mean, rstd = _moments(wide, (2, 3), eps)
    y = ((wide - mean) * rstd).reshape(x.shape)
    y = _scale_and_shift(y, weight, bias)
    return y.astype(x.dtype), mean.reshape(N, group), rstd.reshape(N, group)


@OPS.op(
    aten._native_batch_norm_legit_no_training.default,
    dtypes=FLOATS,
    check=check_parameters,
    pad=normalization_rules.batch_norm,
)
def batch_norm_inference(
    x: Array, weight: Array | None, bias: Array | None, mean: Array, var: Array, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    del momentum
    y = _normalize_channels(x, weight, bias, _wide(mean), lax.rsqrt(_wide(var) + eps))
    empty = jnp.zeros((0,), x.dtype)
    return y, empty, empty


@OPS.op(
    aten._native_batch_norm_legit.no_stats,
    dtypes=FLOATS,
    check=check_parameters,
    pad=normalization_rules.batch_norm_training,
    as_aten=decompose,
)
def batch_norm_without_statistics(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    del training, momentum
    mean, var = _channel_moments(x)
    rstd = lax.rsqrt(var + eps)
    return _normalize_channels(x, weight, bias, mean, rstd), mean, rstd


@OPS.op(
    aten._native_batch_norm_legit_functional.default,
    dtypes=FLOATS,
    check=check_parameters,
    pad=normalization_rules.batch_norm_training,
    as_aten=decompose,
)
def batch_norm_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns (output, batch mean, batch 1 / standard deviation, new running mean, new running variance)."""
    if not training:
        y, empty, _ = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return y, empty, empty, running_mean, running_var
    mean, var = _channel_moments(x)
    rstd = lax.rsqrt(var + eps)
    count = math.prod(x.shape) // x.shape[1]
    # The running variance is the unbiased one.
    unbiased = var * (count / (count - 1)) if count > 1 else jnp.full_like(var, jnp.nan)
    return (
        _normalize_channels(x, weight, bias, mean, rstd),
        mean,
        rstd,
        _running(running_mean, mean, momentum),
        _running(running_var, unbiased, momentum),
    )


def _wide(x: Array) -> Array:
    return cast(x, opmath_dtype(torch_dtype(x)))


def _moments(wide: Array, axes: Sequence[int], eps: float) -> tuple[Array, Array]:
    mean = jnp.mean(wide, axes, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axes, keepdims=True)
    return mean, lax.rsqrt(variance + eps)


def _channel_moments(x: Array) -> tuple[Array, Array]:
    """Mean and biased variance of each channel of x [n, c, ...], in the computation dtype."""
    axes = (0, *range(2, x.ndim))
    wide = _wide(x)
    mean = jnp.mean(wide, axes, keepdims=True)
    return mean.reshape(-1), jnp.mean(jnp.square(wide - mean), axes)


def _normalize_channels(x: Array, weight: Array | None, bias: Array | None, mean: Array, rstd: Array) -> Array:
    """Normalizes by one multiplication and one addition per element; factors per channel are combined first."""
    scale = rstd if weight is None else rstd * _wide(weight)
    shift = -mean * scale
    if bias is not None:
        shift = shift + _wide(bias)
    return (_wide(x) * _per_channel(scale, x.ndim) + _per_channel(shift, x.ndim)).astype(x.dtype)


def _scale_and_shift(y: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        y = y * _per_channel(_wide(weight), y.ndim)
    return y if bias is None else y + _per_channel(_wide(bias), y.ndim)


def _per_channel(values: Array, ndim: int) -> Array:
    return values.reshape(1, -1, *[1] * (ndim - 2))


def _running(old: Array, new: Array, momentum: float) -> Array:
    return momentum * new + (1 - momentum) * _wide(old)
