"""Gradients of activation functions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.bucketing.pad_rules import gradients as gradients_rules
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import FLOATS, INEXACT, REAL_NUMBERS
from dynaxla.ops.eager_errors import check_all, check_half, check_one_dtype, check_slope
from dynaxla.ops.promotion import compute
from dynaxla.ops.record import OpFamily
from dynaxla.ops.transcendental import softplus

aten = torch.ops.aten
OPS = OpFamily()
Number = int | float

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715
_LEAST_SPREAD = 1e-6
"""Of the slopes of a randomized leaky unit; nearer bounds are one slope."""


@OPS.op(aten.gelu_backward.default, dtypes=FLOATS, as_aten=decompose)
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


@OPS.op(aten.silu_backward.default, dtypes=INEXACT, as_aten=decompose)
def silu_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(x)
        return g * s * (1 + x * (1 - s))

    return compute(body, grad_output, self)


@OPS.op(aten.sigmoid_backward.default, dtypes=INEXACT, as_aten=decompose)
def sigmoid_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj((1 - y) * y), grad_output, output)


@OPS.op(aten.tanh_backward.default, dtypes=INEXACT, as_aten=decompose)
def tanh_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj(1 - y * y), grad_output, output)


@OPS.op(aten.hardtanh_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, as_aten=decompose)
def hardtanh_backward(grad_output: jax.Array, self: jax.Array, min_val: Number, max_val: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x <= min_val) | (x >= max_val), 0, g), grad_output, self)


@OPS.op(aten.hardswish_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, as_aten=decompose)
def hardswish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g))

    return compute(body, grad_output, self)


@OPS.op(aten.hardsigmoid_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, as_aten=decompose)
def hardsigmoid_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return compute(lambda g, x: jnp.where((x > -3) & (x < 3), g / 6, 0), grad_output, self)


@OPS.op(
    aten.leaky_relu_backward.default,
    check=check_slope("self_is_result", "negative_slope"),
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
    as_aten=decompose,
)
def leaky_relu_backward(
    grad_output: jax.Array, self: jax.Array, negative_slope: Number, self_is_result: bool
) -> jax.Array:
    del self_is_result  # a result has the sign of its argument
    return compute(lambda g, x: jnp.where(x > 0, g, g * negative_slope), grad_output, self)


@OPS.op(
    aten.elu_backward.default,
    check=check_slope("is_result", "alpha"),
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
    as_aten=decompose,
)
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


@OPS.op(aten.softplus_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, as_aten=decompose)
def softplus_backward(grad_output: jax.Array, self: jax.Array, beta: Number, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x * beta > threshold, g, g * jax.nn.sigmoid(x * beta)), grad_output, self)


@OPS.op(
    aten.hardshrink_backward.default, aten.softshrink_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise
)
def hardshrink_backward(grad_output: jax.Array, self: jax.Array, lambd: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x >= -lambd) & (x <= lambd), 0, g), grad_output, self)


@OPS.op(aten.threshold_backward.default, check=check_one_dtype, dtypes=REAL_NUMBERS, as_aten=decompose)
def threshold_backward(grad_output: jax.Array, self: jax.Array, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x <= threshold, 0, g), grad_output, self)


@OPS.op(
    aten.mish_backward.default,
    check=check_one_dtype,
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
    as_aten=decompose,
)
def mish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        t = jnp.tanh(softplus(x))
        return g * (t + x * jax.nn.sigmoid(x) * (1 - t * t))

    return compute(body, grad_output, self)


@OPS.op(aten.log_sigmoid_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def log_sigmoid_backward(grad_output: jax.Array, self: jax.Array, buffer: jax.Array) -> jax.Array:
    del buffer  # exp(-|self|) on the CPU, empty on CUDA: cheaper to compute than to depend on the device
    return compute(lambda g, x: g * jax.nn.sigmoid(-x), grad_output, self)


@OPS.op(aten._prelu_kernel_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, as_aten=decompose)
def prelu_backward(grad_output: jax.Array, self: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad_self = compute(lambda g, x, w: jnp.where(x > 0, g, w * g), grad_output, self, weight)
    return grad_self, compute(lambda g, x: jnp.where(x > 0, 0, x * g), grad_output, self)


@OPS.op(aten.glu_backward.default, dtypes=FLOATS, check=check_half, pad=gradients_rules.glu_backward, as_aten=decompose)
def glu_backward(grad_output: jax.Array, self: jax.Array, dim: int) -> jax.Array:
    value, gate = jnp.split(self, 2, axis=dim)
    grad_value = compute(lambda g, b: g * jax.nn.sigmoid(b), grad_output, gate)

    def gate_body(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(b)
        return g * a * s * (1 - s)

    return jnp.concatenate([grad_value, compute(gate_body, grad_output, value, gate)], axis=dim)


def _check_drawn_slope(node: Node) -> str | None:
    given = arguments_of(node)
    is_drawn = given["training"] and given["upper"] - given["lower"] > _LEAST_SPREAD
    return None if is_drawn else check_slope("self_is_result", "lower", "upper")(node)


@OPS.op(
    aten.rrelu_with_noise_backward.default,
    check=check_all(check_one_dtype, _check_drawn_slope),
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
)
def rrelu_with_noise_backward(
    grad_output: jax.Array,
    self: jax.Array,
    noise: jax.Array,
    lower: Number,
    upper: Number,
    training: bool,
    self_is_result: bool,
) -> jax.Array:
    if training and upper - lower > _LEAST_SPREAD:
        return compute(jnp.multiply, grad_output, noise)
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)
