"""Arithmetic: torch's promotion, division and rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import (
    COMPLEX,
    FLOATS,
    HALVES,
    INEXACT,
    INTEGERS,
    NUMBERS,
    REAL,
    REAL_NUMBERS,
    WHOLE_NUMBERS,
    WIDE_FLOATS,
    WORDS,
)
from dynaxla.ops.findings import COMPUTED, COMPUTED_OF_FLOATS_ROUGHLY, COMPUTED_ROUGHLY
from dynaxla.ops.promotion import (
    Operand,
    Scalar,
    cast,
    compute,
    elementwise,
    inexact_elementwise,
    opmath_dtype,
    promote,
    result_dtype,
    round_to,
    torch_dtype,
)
from dynaxla.ops.record import Family, right, rounds, wrong

aten = torch.ops.aten
OPS = Family()


@OPS.op(
    aten.add.Tensor,
    torch_mlir=COMPUTED_ROUGHLY,
)
@OPS.op(aten.add.Scalar, torch_mlir=COMPUTED_ROUGHLY)
def add(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return compute(lambda a, b: a + b * cast(alpha, torch_dtype(b)), self, other, exact_scalars=True)


@OPS.op(
    aten.sub.Tensor,
    torch_mlir=(
        right(WHOLE_NUMBERS | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
@OPS.op(
    aten.sub.Scalar,
    dtypes=NUMBERS,
    torch_mlir=(
        right(WHOLE_NUMBERS | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def sub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return compute(lambda a, b: a - b * cast(alpha, torch_dtype(b)), self, other, exact_scalars=True)


@OPS.op(aten.rsub.Tensor, pad=elementwise_rules.elementwise)
@OPS.op(
    aten.rsub.Scalar,
    dtypes=NUMBERS,
    torch_mlir=(
        right(WHOLE_NUMBERS | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def rsub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return sub(other, self, alpha)


@OPS.op(aten.mul.Tensor, torch_mlir=COMPUTED_ROUGHLY)
@OPS.op(
    aten.mul.Scalar,
    torch_mlir=COMPUTED_ROUGHLY,
)
def mul(self: Operand, other: Operand) -> jax.Array:
    return compute(jnp.multiply, self, other, exact_scalars=True)


@OPS.op(aten.div.Tensor, torch_mlir=COMPUTED_ROUGHLY)
@OPS.op(
    aten.div.Scalar,
    torch_mlir=COMPUTED_ROUGHLY,
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
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        right(WHOLE_NUMBERS),
        wrong(FLOATS, "18.0 not 17.0: [(([5, 10, 5]), bfloat16), (([5, 10, 5]), bfloat16)]"),
    ),
)
@OPS.op(
    aten.floor_divide.Scalar,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        right(INTEGERS),
        wrong(FLOATS, "inf not nan: [(([16]), bfloat16), 3]"),
    ),
)
def floor_divide(self: Operand, other: Operand) -> jax.Array:
    return compute(_floor_div, self, other)


@OPS.op(
    aten.remainder.Tensor,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        wrong(
            FLOATS | WORDS | {torch.int16, torch.int8}, "4.5625 not -3.9375: [(([]), bfloat16), (([10, 5]), bfloat16)]"
        ),
    ),
)
@OPS.op(aten.remainder.Scalar, aten.remainder.Scalar_Tensor, dtypes=REAL)
def remainder(self: Operand, other: Operand) -> jax.Array:
    return compute(_python_mod, self, other)


@OPS.op(
    aten.fmod.Tensor,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(WHOLE_NUMBERS),
        wrong(FLOATS, "1.4e-02 of the value off eager; the JAX body 0.0e+00 | [(([]), bfloat1"),
    ),
)
@OPS.op(aten.fmod.Scalar, dtypes=REAL)
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


@OPS.op(
    aten.pow.Tensor_Tensor,
    dtypes=NUMBERS,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        wrong({torch.uint8}, "0 not 183: [(([8, 1]), uint8), (([1, 8]), uint8)]"),
        rounds(HALVES),
    ),
)
@OPS.op(
    aten.pow.Scalar,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.bool, torch.int16, torch.int8}),
        wrong({torch.uint8}, "0 not 171: [3, (([8]), uint8)]"),
        rounds(HALVES),
    ),
)
def pow_tensor(self: Operand, exponent: Operand) -> jax.Array:
    return compute(_power, self, exponent)


def _is_rsqrt(call: Node) -> bool:
    return bool(call.args[1] == -0.5)


@OPS.op(
    aten.pow.Tensor_Scalar,
    torch_mlir=(
        right(WHOLE_NUMBERS | WIDE_FLOATS),
        wrong(WIDE_FLOATS, "(-inf) ** -0.5 is 0", _is_rsqrt),
        wrong({torch.bool}, "int64[], not bool[]: [([]), bool), True]"),
        rounds(HALVES),
    ),
)
def pow_scalar(self: jax.Array, exponent: Scalar) -> jax.Array:
    dtype = result_dtype(self, exponent)
    if not (dtype.is_floating_point and exponent in (0.5, -0.5)):
        return pow_tensor(self, exponent)
    # Torch takes the square root here, which differs from a power at -inf and -0.
    return compute(lambda x, _: lax.sqrt(x) if exponent == 0.5 else 1 / lax.sqrt(x), self, exponent)


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    if jnp.issubdtype(base.dtype, jnp.inexact):
        return jnp.power(base, exponent)
    if base.dtype == jnp.bool_:
        return base | ~exponent
    power = jnp.power(base, jnp.maximum(exponent, 0))
    sign = jnp.where(exponent % 2 == 0, 1, base)
    inverse = jnp.where((base == 1) | (base + 1 == 0), sign, 0)
    return jnp.where(exponent < 0, inverse, power)


@OPS.op(aten.neg.default, torch_mlir=(right(NUMBERS),))
def neg(self: jax.Array) -> jax.Array:
    return -self


@OPS.op(
    aten.abs.default,
    dtypes=NUMBERS,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        wrong(COMPLEX, "0.8959430318317265 not 1.9801148732232479: [(([]), complex128)]"),
        rounds(HALVES),
    ),
)
def absolute(self: jax.Array) -> jax.Array:
    return jnp.abs(self)


@OPS.op(
    aten.sign.default,
    dtypes=REAL,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        rounds(HALVES),
    ),
)
def sign(self: jax.Array) -> jax.Array:
    if self.dtype == jnp.bool_:
        return self
    signs = (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)  # torch: the sign of NaN is 0
    return signs


@OPS.op(
    aten.sgn.default,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        rounds(HALVES),
    ),
)
def sgn(self: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(self):
        return sign(self)
    size = jnp.abs(self)
    return jnp.where(size == 0, 0, self / size)


@OPS.op(aten.reciprocal.default, torch_mlir=COMPUTED_OF_FLOATS_ROUGHLY)
def reciprocal(self: jax.Array) -> jax.Array:
    return compute(lambda x: 1 / x, self, inexact=True)


@OPS.op(aten.addcmul.default, dtypes=NUMBERS)
def addcmul(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b * c, self, tensor1, tensor2)


@OPS.op(
    aten.addcdiv.default,
    dtypes=NUMBERS,
    torch_mlir=(wrong({torch.bfloat16}, "6.8e-03 of the value off eager; the JAX body 0.0e+00 | [(([5, 5]), bfl"),),
)
def addcdiv(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b / c, self, tensor1, tensor2)


@OPS.op(aten.lerp.Scalar, aten.lerp.Tensor, dtypes=INEXACT)
def lerp(self: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    dtype = opmath_dtype(torch_dtype(self))
    start, stop, step = cast(self, dtype), cast(end, dtype), cast(weight, dtype)
    near, far = start + step * (stop - start), stop - (stop - start) * (1 - step)
    return cast(jnp.where(jnp.abs(step) < 0.5, near, far), torch_dtype(self))


OPS.op(
    aten.maximum.default,
    dtypes=REAL,
    torch_mlir=COMPUTED,
)(elementwise(jnp.maximum))
OPS.op(
    aten.minimum.default,
    dtypes=REAL,
    torch_mlir=COMPUTED,
)(elementwise(jnp.minimum))
OPS.op(aten.fmax.default, dtypes=REAL)(elementwise(jnp.fmax))
OPS.op(aten.fmin.default, dtypes=REAL)(elementwise(jnp.fmin))
OPS.op(aten.atan2.default, dtypes=REAL, torch_mlir=COMPUTED_ROUGHLY)(inexact_elementwise(jnp.arctan2))
OPS.op(aten.hypot.default, dtypes=FLOATS)(elementwise(jnp.hypot))
OPS.op(
    aten.copysign.Tensor,
    dtypes=REAL,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        rounds(HALVES),
    ),
)(inexact_elementwise(jnp.copysign))
OPS.op(aten.copysign.Scalar, dtypes=REAL)(inexact_elementwise(jnp.copysign))
OPS.op(aten.gcd.default, dtypes=WHOLE_NUMBERS)(elementwise(jnp.gcd))
OPS.op(
    aten.logaddexp.default,
    dtypes=FLOATS,
    torch_mlir=(
        right(WIDE_FLOATS | {torch.int64}),
        rounds(HALVES),
    ),
)(elementwise(jnp.logaddexp))
OPS.op(
    aten.logaddexp2.default,
    dtypes=FLOATS,
    torch_mlir=(
        right(WIDE_FLOATS | {torch.int64}),
        rounds(HALVES),
    ),
)(elementwise(jnp.logaddexp2))


@OPS.op(aten.nextafter.default, dtypes=FLOATS)
def nextafter(self: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.nextafter(*promote(self, other))  # never widened: the step is that of the dtype itself


@OPS.op(aten.lcm.default, dtypes=INTEGERS)
def lcm(self: jax.Array, other: jax.Array) -> jax.Array:
    a, b = promote(self, other)
    divisor = jnp.gcd(a, b)
    return jnp.where(divisor == 0, 0, jnp.abs(a // jnp.maximum(divisor, 1) * b))


@OPS.op(aten.ldexp.Tensor, torch_mlir=COMPUTED_ROUGHLY)
def ldexp(self: jax.Array, other: jax.Array) -> jax.Array:
    return mul(self, pow_tensor(2.0, other))


@OPS.op(
    aten.heaviside.default,
    dtypes=REAL,
    torch_mlir=(
        right(WORDS | WIDE_FLOATS | {torch.int16, torch.int8}),
        rounds(HALVES),
    ),
)
def heaviside(self: jax.Array, values: jax.Array) -> jax.Array:
    return compute(lambda x, at_zero: jnp.where(x == 0, at_zero, (x > 0).astype(x.dtype)), self, values)
