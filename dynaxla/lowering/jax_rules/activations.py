"""JAX rules of the activation functions and of their derivatives."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.lowering.jax_rules.promotion import compute, inexact_elementwise
from dynaxla.lowering.jax_rules.rule_set import RuleSet

aten = torch.ops.aten
RULES = RuleSet()
Number = int | float

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715

RULES.rule(aten.sigmoid.default)(inexact_elementwise(jax.nn.sigmoid))


@RULES.rule(aten.relu.default)
def relu(self: jax.Array) -> jax.Array:
    return jnp.maximum(self, jnp.zeros_like(self))


@RULES.rule(aten.gelu.default)
def gelu(self: jax.Array, approximate: str = "none") -> jax.Array:
    if approximate == "tanh":
        return compute(lambda x: 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3))), self)
    return compute(lambda x: 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5))), self)


@RULES.rule(aten.gelu_backward.default)
def gelu_backward(grad_output: jax.Array, self: jax.Array, approximate: str = "none") -> jax.Array:
    return compute(
        lambda g, x: g * (_gelu_tanh_slope(x) if approximate == "tanh" else _gelu_slope(x)), grad_output, self
    )


def _gelu_slope(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + lax.erf(x * math.sqrt(0.5))) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x: jax.Array) -> jax.Array:
    t = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3))
    inner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


@RULES.rule(aten.silu.default)
def silu(self: jax.Array) -> jax.Array:
    return compute(lambda x: x / (1 + jnp.exp(-x)), self)


@RULES.rule(aten.silu_backward.default)
def silu_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(x)
        return g * s * (1 + x * (1 - s))

    return compute(body, grad_output, self)


@RULES.rule(aten.sigmoid_backward.default)
def sigmoid_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj((1 - y) * y), grad_output, output)


@RULES.rule(aten.tanh_backward.default)
def tanh_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj(1 - y * y), grad_output, output)


@RULES.rule(aten.hardtanh.default)
def hardtanh(self: jax.Array, min_val: Number = -1, max_val: Number = 1) -> jax.Array:
    return compute(lambda x: jnp.minimum(jnp.maximum(x, min_val), max_val), self)


@RULES.rule(aten.hardtanh_backward.default)
def hardtanh_backward(grad_output: jax.Array, self: jax.Array, min_val: Number, max_val: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x <= min_val) | (x >= max_val), 0, g), grad_output, self)


@RULES.rule(aten.hardswish.default)
def hardswish(self: jax.Array) -> jax.Array:
    return compute(lambda x: x * jnp.clip(x + 3, 0, 6) / 6, self)


@RULES.rule(aten.hardswish_backward.default)
def hardswish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g))

    return compute(body, grad_output, self)


@RULES.rule(aten.hardsigmoid.default)
def hardsigmoid(self: jax.Array) -> jax.Array:
    return compute(lambda x: jnp.clip(x + 3, 0, 6) / 6, self)


@RULES.rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return compute(lambda g, x: jnp.where((x > -3) & (x < 3), g / 6, 0), grad_output, self)


@RULES.rule(aten.leaky_relu.default)
def leaky_relu(self: jax.Array, negative_slope: Number = 0.01) -> jax.Array:
    return compute(lambda x: jnp.where(x > 0, x, x * negative_slope), self)


@RULES.rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad_output: jax.Array, self: jax.Array, negative_slope: Number, self_is_result: bool
) -> jax.Array:
    del self_is_result  # a result has the sign of its argument
    return compute(lambda g, x: jnp.where(x > 0, g, g * negative_slope), grad_output, self)


@RULES.rule(aten.elu.default)
def elu(self: jax.Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> jax.Array:
    def body(x: jax.Array) -> jax.Array:
        return jnp.where(x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)

    return compute(body, self)


@RULES.rule(aten.elu_backward.default)
def elu_backward(
    grad_output: jax.Array,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: jax.Array,
) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        grown = x + alpha * scale if is_result else alpha * scale * jnp.exp(x * input_scale)
        return jnp.where(x <= 0, g * input_scale * grown, g * scale)

    return compute(body, grad_output, self_or_result)


@RULES.rule(aten.celu.default)
def celu(self: jax.Array, alpha: Number = 1.0) -> jax.Array:
    return elu(self, alpha, 1.0, 1.0 / alpha)


@RULES.rule(aten.softplus.default)
def softplus(self: jax.Array, beta: Number = 1, threshold: Number = 20) -> jax.Array:
    return compute(lambda x: jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta), self)


@RULES.rule(aten.softplus_backward.default)
def softplus_backward(grad_output: jax.Array, self: jax.Array, beta: Number, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x * beta > threshold, g, g * jax.nn.sigmoid(x * beta)), grad_output, self)


@RULES.rule(aten.softshrink.default)
def softshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    return compute(lambda x: jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0)), self)


@RULES.rule(aten.hardshrink.default)
def hardshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    return hardshrink_backward(self, self, lambd)


@RULES.rule(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def hardshrink_backward(grad_output: jax.Array, self: jax.Array, lambd: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x >= -lambd) & (x <= lambd), 0, g), grad_output, self)


@RULES.rule(aten.threshold.default)
def threshold(self: jax.Array, threshold: Number, value: Number) -> jax.Array:
    return compute(lambda x: jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x), self)


@RULES.rule(aten.threshold_backward.default)
def threshold_backward(grad_output: jax.Array, self: jax.Array, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x <= threshold, 0, g), grad_output, self)


@RULES.rule(aten.mish.default)
def mish(self: jax.Array) -> jax.Array:
    return compute(lambda x: x * jnp.tanh(jax.nn.softplus(x)), self)


@RULES.rule(aten.mish_backward.default)
def mish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        t = jnp.tanh(jax.nn.softplus(x))
        return g * (t + x * jax.nn.sigmoid(x) * (1 - t * t))

    return compute(body, grad_output, self)


@RULES.rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = compute(lambda x: jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x))), self)
    return output, compute(lambda x: jnp.exp(-jnp.abs(x)), self)


@RULES.rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad_output: jax.Array, self: jax.Array, buffer: jax.Array) -> jax.Array:
    del buffer  # exp(-|self|) on the CPU, empty on CUDA: cheaper to compute than to depend on the device
    return compute(lambda g, x: g * jax.nn.sigmoid(-x), grad_output, self)


@RULES.rule(aten._prelu_kernel.default)
def prelu(self: jax.Array, weight: jax.Array) -> jax.Array:
    return compute(lambda x, w: jnp.where(x > 0, x, w * x), self, weight)


@RULES.rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad_output: jax.Array, self: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad_self = compute(lambda g, x, w: jnp.where(x > 0, g, w * g), grad_output, self, weight)
    return grad_self, compute(lambda g, x: jnp.where(x > 0, 0, x * g), grad_output, self)


@RULES.rule(aten.glu.default)
def glu(self: jax.Array, dim: int = -1) -> jax.Array:
    value, gate = jnp.split(self, 2, axis=dim)
    return compute(lambda a, b: a * jax.nn.sigmoid(b), value, gate)


@RULES.rule(aten.glu_backward.default)
def glu_backward(grad_output: jax.Array, self: jax.Array, dim: int) -> jax.Array:
    value, gate = jnp.split(self, 2, axis=dim)
    grad_value = compute(lambda g, b: g * jax.nn.sigmoid(b), grad_output, gate)

    def gate_body(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(b)
        return g * a * s * (1 - s)

    return jnp.concatenate([grad_value, compute(gate_body, grad_output, value, gate)], axis=dim)


@RULES.rule(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(
    grad_output: jax.Array,
    self: jax.Array,
    noise: jax.Array,
    lower: Number,
    upper: Number,
    training: bool,
    self_is_result: bool,
) -> jax.Array:
    if training and upper - lower > 1e-6:
        return compute(jnp.multiply, grad_output, noise)
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)
