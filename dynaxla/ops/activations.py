"""Activation functions and their derivatives."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.rules import backwards as backwards_rules
from dynaxla.bucketing.rules import elementwise as elementwise_rules
from dynaxla.bucketing.rules import pieces as pieces_rules
from dynaxla.ops.dtypes import FLOATS, HALVES, INEXACT, REAL, REAL_NUMBERS, WHOLE_NUMBERS, WIDE_FLOATS, WORDS
from dynaxla.ops.findings import COMPUTED_OF_FLOATS_ROUGHLY, COMPUTED_ROUGHLY
from dynaxla.ops.promotion import compute, inexact_elementwise
from dynaxla.ops.record import Family, right, rounds, wrong

aten = torch.ops.aten
OPS = Family()
Number = int | float

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715

OPS.op(
    aten.sigmoid.default,
    torch_mlir=COMPUTED_ROUGHLY,
)(inexact_elementwise(jax.nn.sigmoid))


@OPS.op(aten.relu.default, dtypes=REAL_NUMBERS, torch_mlir=(right(REAL_NUMBERS),))
def relu(self: jax.Array) -> jax.Array:
    return jnp.maximum(self, jnp.zeros_like(self))


@OPS.op(aten.gelu.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def gelu(self: jax.Array, approximate: str = "none") -> jax.Array:
    if approximate == "tanh":
        return compute(lambda x: 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3))), self)
    return compute(lambda x: 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5))), self)


@OPS.op(aten.gelu_backward.default, dtypes=FLOATS)
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


@OPS.op(aten.silu.default, dtypes=INEXACT, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def silu(self: jax.Array) -> jax.Array:
    return compute(lambda x: x / (1 + jnp.exp(-x)), self)


@OPS.op(aten.silu_backward.default, dtypes=INEXACT)
def silu_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(x)
        return g * s * (1 + x * (1 - s))

    return compute(body, grad_output, self)


@OPS.op(aten.sigmoid_backward.default, dtypes=INEXACT)
def sigmoid_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj((1 - y) * y), grad_output, output)


@OPS.op(aten.tanh_backward.default, dtypes=INEXACT)
def tanh_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return compute(lambda g, y: g * jnp.conj(1 - y * y), grad_output, output)


@OPS.op(
    aten.hardtanh.default,
    dtypes=REAL,
    torch_mlir=(
        right(WHOLE_NUMBERS | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def hardtanh(self: jax.Array, min_val: Number = -1, max_val: Number = 1) -> jax.Array:
    return compute(lambda x: jnp.minimum(jnp.maximum(x, min_val), max_val), self)


@OPS.op(aten.hardtanh_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def hardtanh_backward(grad_output: jax.Array, self: jax.Array, min_val: Number, max_val: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x <= min_val) | (x >= max_val), 0, g), grad_output, self)


@OPS.op(aten.hardswish.default, dtypes=FLOATS, pad=elementwise_rules.elementwise, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def hardswish(self: jax.Array) -> jax.Array:
    return compute(lambda x: x * jnp.clip(x + 3, 0, 6) / 6, self)


@OPS.op(aten.hardswish_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def hardswish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g))

    return compute(body, grad_output, self)


@OPS.op(aten.hardsigmoid.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def hardsigmoid(self: jax.Array) -> jax.Array:
    return compute(lambda x: jnp.clip(x + 3, 0, 6) / 6, self)


@OPS.op(aten.hardsigmoid_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def hardsigmoid_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return compute(lambda g, x: jnp.where((x > -3) & (x < 3), g / 6, 0), grad_output, self)


@OPS.op(aten.leaky_relu.default, dtypes=REAL, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def leaky_relu(self: jax.Array, negative_slope: Number = 0.01) -> jax.Array:
    return compute(lambda x: jnp.where(x > 0, x, x * negative_slope), self)


@OPS.op(
    aten.leaky_relu_backward.default,
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
    torch_mlir=(wrong(FLOATS, "1.234375 not 0.01318359375: [(([10, 10]), bfloat16), (([10, 10]), bflo"),),
)
def leaky_relu_backward(
    grad_output: jax.Array, self: jax.Array, negative_slope: Number, self_is_result: bool
) -> jax.Array:
    del self_is_result  # a result has the sign of its argument
    return compute(lambda g, x: jnp.where(x > 0, g, g * negative_slope), grad_output, self)


@OPS.op(aten.elu.default, dtypes=REAL, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def elu(self: jax.Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> jax.Array:
    def body(x: jax.Array) -> jax.Array:
        return jnp.where(x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)

    return compute(body, self)


@OPS.op(aten.elu_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
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


@OPS.op(aten.celu.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def celu(self: jax.Array, alpha: Number = 1.0) -> jax.Array:
    return elu(self, alpha, 1.0, 1.0 / alpha)


@OPS.op(aten.softplus.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def softplus(self: jax.Array, beta: Number = 1, threshold: Number = 20) -> jax.Array:
    return compute(lambda x: jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta), self)


@OPS.op(aten.softplus_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def softplus_backward(grad_output: jax.Array, self: jax.Array, beta: Number, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x * beta > threshold, g, g * jax.nn.sigmoid(x * beta)), grad_output, self)


@OPS.op(aten.softshrink.default, dtypes=REAL, torch_mlir=(wrong(FLOATS, "-9.0 not -8.0: [(([]), bfloat16)]"),))
def softshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    return compute(lambda x: jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0)), self)


@OPS.op(aten.hardshrink.default, dtypes=FLOATS, torch_mlir=(wrong(FLOATS, "0.0 not nan: [(([16]), bfloat16)]"),))
def hardshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    return hardshrink_backward(self, self, lambd)


@OPS.op(
    aten.hardshrink_backward.default, aten.softshrink_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise
)
def hardshrink_backward(grad_output: jax.Array, self: jax.Array, lambd: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where((x >= -lambd) & (x <= lambd), 0, g), grad_output, self)


@OPS.op(
    aten.threshold.default,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(WORDS | {torch.int16, torch.int8}),
        wrong(FLOATS, "3.0 not nan: [(([16]), bfloat16), 3, 3]"),
    ),
)
def threshold(self: jax.Array, threshold: Number, value: Number) -> jax.Array:
    return compute(lambda x: jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x), self)


@OPS.op(aten.threshold_backward.default, dtypes=REAL_NUMBERS)
def threshold_backward(grad_output: jax.Array, self: jax.Array, threshold: Number) -> jax.Array:
    return compute(lambda g, x: jnp.where(x <= threshold, 0, g), grad_output, self)


@OPS.op(aten.mish.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def mish(self: jax.Array) -> jax.Array:
    return compute(lambda x: x * jnp.tanh(jax.nn.softplus(x)), self)


@OPS.op(aten.mish_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def mish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    def body(g: jax.Array, x: jax.Array) -> jax.Array:
        t = jnp.tanh(jax.nn.softplus(x))
        return g * (t + x * jax.nn.sigmoid(x) * (1 - t * t))

    return compute(body, grad_output, self)


@OPS.op(aten.log_sigmoid_forward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def log_sigmoid_forward(self: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = compute(lambda x: jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x))), self)
    return output, compute(lambda x: jnp.exp(-jnp.abs(x)), self)


@OPS.op(aten.log_sigmoid_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def log_sigmoid_backward(grad_output: jax.Array, self: jax.Array, buffer: jax.Array) -> jax.Array:
    del buffer  # exp(-|self|) on the CPU, empty on CUDA: cheaper to compute than to depend on the device
    return compute(lambda g, x: g * jax.nn.sigmoid(-x), grad_output, self)


@OPS.op(aten._prelu_kernel.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def prelu(self: jax.Array, weight: jax.Array) -> jax.Array:
    return compute(lambda x, w: jnp.where(x > 0, x, w * x), self, weight)


@OPS.op(aten._prelu_kernel_backward.default, dtypes=FLOATS, pad=elementwise_rules.elementwise)
def prelu_backward(grad_output: jax.Array, self: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad_self = compute(lambda g, x, w: jnp.where(x > 0, g, w * g), grad_output, self, weight)
    return grad_self, compute(lambda g, x: jnp.where(x > 0, 0, x * g), grad_output, self)


@OPS.op(aten.glu.default, dtypes=FLOATS, pad=pieces_rules.glu, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def glu(self: jax.Array, dim: int = -1) -> jax.Array:
    value, gate = jnp.split(self, 2, axis=dim)
    return compute(lambda a, b: a * jax.nn.sigmoid(b), value, gate)


@OPS.op(aten.glu_backward.default, dtypes=FLOATS, pad=backwards_rules.glu_backward)
def glu_backward(grad_output: jax.Array, self: jax.Array, dim: int) -> jax.Array:
    value, gate = jnp.split(self, 2, axis=dim)
    grad_value = compute(lambda g, b: g * jax.nn.sigmoid(b), grad_output, gate)

    def gate_body(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(b)
        return g * a * s * (1 - s)

    return jnp.concatenate([grad_value, compute(gate_body, grad_output, value, gate)], axis=dim)


@OPS.op(
    aten.rrelu_with_noise_backward.default,
    dtypes=FLOATS,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        wrong(
            {torch.bfloat16, torch.float32}, "-1.953125 not -0.298828125: [(([5]), bfloat16), (([5]), bfloat16), ((["
        ),
    ),
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
    if training and upper - lower > 1e-6:
        return compute(jnp.multiply, grad_output, noise)
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)
