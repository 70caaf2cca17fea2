"""Quotients, rounded or not, and remainders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import FLOATS, HALVES, INT32_INT64, INTEGERS_WITHOUT_BOOL, REAL, REAL_NUMBERS
from dynaxla.ops.eager_errors import check_divisor
from dynaxla.ops.promotion import Operand, compute, result_dtype, round_to
from dynaxla.ops.record import OpFamily, right, wrong
from dynaxla.ops.torch_mlir_verdicts import COMPUTED_WIDE_ONLY

aten = torch.ops.aten
OPS = OpFamily()


@OPS.op(aten.div.Tensor, torch_mlir=COMPUTED_WIDE_ONLY)
@OPS.op(
    aten.div.Scalar,
    torch_mlir=COMPUTED_WIDE_ONLY,
)
def div(self: Operand, other: Operand) -> jax.Array:
    return compute(jnp.divide, self, other, inexact=True, exact_scalars=True)


@OPS.op(
    aten.div.Tensor_mode,
    torch_mlir=(
        wrong(HALVES | {torch.float32}, "18.0 not 17.0: [(([5, 10, 5]), bfloat16), (([5, 10, 5]), bfloat16), 'f"),
    ),
)
@OPS.op(
    aten.div.Scalar_mode,
    check=check_divisor,
    torch_mlir=(wrong(FLOATS | {torch.int64}, "-29.0 not -30.0: [(([3, 4]), bfloat16), 0.1, 'floor']"),),
)
def div_mode(self: Operand, other: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        return div(self, other)
    if rounding_mode == "floor":
        return compute(_floor_div, self, other)
    dtype = result_dtype(self, other)
    return compute(lambda a, b: _trunc_div(a, b, dtype), self, other)


@OPS.op(
    aten.floor_divide.default,
    check=check_divisor,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        wrong(FLOATS, "18.0 not 17.0: [(([5, 10, 5]), bfloat16), (([5, 10, 5]), bfloat16)]"),
        wrong({torch.int64}, "computed in float64: (2 ** 63 - 1) // 3 is off by 170"),
    ),
)
@OPS.op(
    aten.floor_divide.Scalar,
    check=check_divisor,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        right({torch.bool}),
        wrong(FLOATS, "inf not nan: [(([16]), bfloat16), 3]"),
        wrong({torch.int64}, "computed in float64: (2 ** 63 - 1) // 3 is off by 170"),
    ),
)
def floor_divide(self: Operand, other: Operand) -> jax.Array:
    return compute(_floor_div, self, other)


@OPS.op(
    aten.remainder.Tensor,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        wrong(
            FLOATS | INT32_INT64 | {torch.int16, torch.int8},
            "4.5625 not -3.9375: [(([]), bfloat16), (([10, 5]), bfloat16)]",
        ),
    ),
)
@OPS.op(aten.remainder.Scalar, aten.remainder.Scalar_Tensor, check=check_divisor, dtypes=REAL)
def remainder(self: Operand, other: Operand) -> jax.Array:
    return compute(_python_mod, self, other)


@OPS.op(
    aten.fmod.Tensor,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(INTEGERS_WITHOUT_BOOL),
        wrong(FLOATS, "1.4e-02 of the value off eager; the JAX body 0.0e+00 | [(([]), bfloat1"),
    ),
)
@OPS.op(aten.fmod.Scalar, check=check_divisor, dtypes=REAL)
def fmod(self: Operand, other: Operand) -> jax.Array:
    return compute(lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)), self, other)


def _python_mod(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = jnp.broadcast_arrays(a, b)
    mod = lax.rem(a, b)
    return jnp.where((mod != 0) & ((mod < 0) != (b < 0)), mod + b, mod)


def _trunc_div(a: jax.Array, b: jax.Array, dtype: torch.dtype) -> jax.Array:
    quotient = lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(round_to(quotient, dtype)) if dtype.is_floating_point else quotient


def _floor_div(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = jnp.broadcast_arrays(a, b)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        mod = lax.rem(a, b)
        return lax.div(a, b) - ((mod != 0) & ((mod < 0) != (b < 0))).astype(a.dtype)
    mod = lax.rem(a, b)
    quotient = (a - mod) / b
    quotient = jnp.where((mod != 0) & ((mod < 0) != (b < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    # The division above is only nearly exact: round to the nearest integer, not below it.
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(a), a / b), floored)
    return jnp.where(b == 0, a / b, floored)
