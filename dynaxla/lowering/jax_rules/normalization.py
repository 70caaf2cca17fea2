"""Normalization layers: statistics in float32 for low precision, as torch's CPU kernels keep them."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.lowering.jax_rules.rule_set import RuleSet

RULES = RuleSet()
aten = torch.ops.aten


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@RULES.rule(aten.native_layer_norm.default)
def native_layer_norm(
    x: Array, normalized_shape: list[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(x)
    mean = jnp.mean(wide, axes, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axes, keepdims=True)
    rstd = lax.rsqrt(variance + eps)
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    kept = x.dtype if x.dtype == (weight.dtype if weight is not None else x.dtype) else wide.dtype
    return y.astype(x.dtype), mean.astype(kept), rstd.astype(kept)


@RULES.rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: Array, weight: Array | None, bias: Array | None, mean: Array, var: Array, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    scale = lax.rsqrt(_wide(var) + eps)
    if weight is not None:
        scale = scale * _wide(weight)
    shift = -_wide(mean) * scale
    if bias is not None:
        shift = shift + _wide(bias)
    broadcast = (1, -1, *[1] * (x.ndim - 2))
    y = _wide(x) * scale.reshape(broadcast) + shift.reshape(broadcast)
    return y.astype(x.dtype), jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype)
