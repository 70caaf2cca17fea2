"""JAX rules of the arithmetic ATen ops: torch's promotion, division and rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.lowering.jax_rules.promotion import (
    Operand,
    Scalar,
    cast,
    compute,
    elementwise,
    inexact_dtype,
    inexact_elementwise,
    opmath_dtype,
    promote,
    result_dtype,
    round_to,
    torch_dtype,
)
from dynaxla.lowering.jax_rules.rule_set import RuleSet

aten = torch.ops.aten
RULES = RuleSet()


@RULES.rule(aten.add.Tensor, aten.add.Scalar)
def add(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return compute(lambda a, b: a + b * cast(alpha, torch_dtype(b)), self, other, exact_scalars=True)


@RULES.rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return compute(lambda a, b: a - b * cast(alpha, torch_dtype(b)), self, other, exact_scalars=True)


@RULES.rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return sub(other, self, alpha)


@RULES.rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(self: Operand, other: Operand) -> jax.Array:
    return compute(jnp.multiply, self, other, exact_scalars=True)


@RULES.rule(aten.div.Tensor, aten.div.Scalar)
def div(self: Operand, other: Operand) -> jax.Array:
    return compute(jnp.divide, self, other, inexact=True, exact_scalars=True)


@RULES.rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(self: Operand, other: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        return div(self, other)
    if rounding_mode == "floor":
        return compute(_floor_div, self, other)
    dtype = result_dtype(self, other)
    return compute(lambda a, b: _trunc_div(a, b, dtype), self, other)


@RULES.rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(self: Operand, other: Operand) -> jax.Array:
    return compute(_floor_div, self, other)


@RULES.rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(self: Operand, other: Operand) -> jax.Array:
    return compute(_python_mod, self, other)


@RULES.rule(aten.fmod.Tensor, aten.fmod.Scalar)
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


@RULES.rule(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(self: Operand, exponent: Operand) -> jax.Array:
    return compute(_power, self, exponent)


@RULES.rule(aten.pow.Tensor_Scalar)
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


@RULES.rule(aten.neg.default)
def neg(self: jax.Array) -> jax.Array:
    return -self


@RULES.rule(aten.abs.default)
def absolute(self: jax.Array) -> jax.Array:
    return jnp.abs(self)


@RULES.rule(aten.sign.default)
def sign(self: jax.Array) -> jax.Array:
    if self.dtype == jnp.bool_:
        return self
    signs = (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)  # torch: the sign of NaN is 0
    return signs


@RULES.rule(aten.sgn.default)
def sgn(self: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(self):
        return sign(self)
    size = jnp.abs(self)
    return jnp.where(size == 0, 0, self / size)


@RULES.rule(aten.reciprocal.default)
def reciprocal(self: jax.Array) -> jax.Array:
    return compute(lambda x: 1 / x, self, inexact=True)


@RULES.rule(aten.addcmul.default)
def addcmul(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b * c, self, tensor1, tensor2)


@RULES.rule(aten.addcdiv.default)
def addcdiv(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b / c, self, tensor1, tensor2)


@RULES.rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    dtype = opmath_dtype(torch_dtype(self))
    start, stop, step = cast(self, dtype), cast(end, dtype), cast(weight, dtype)
    near, far = start + step * (stop - start), stop - (stop - start) * (1 - step)
    return cast(jnp.where(jnp.abs(step) < 0.5, near, far), torch_dtype(self))


RULES.rule(aten.maximum.default)(elementwise(jnp.maximum))
RULES.rule(aten.minimum.default)(elementwise(jnp.minimum))
RULES.rule(aten.fmax.default)(elementwise(jnp.fmax))
RULES.rule(aten.fmin.default)(elementwise(jnp.fmin))
RULES.rule(aten.atan2.default)(inexact_elementwise(jnp.arctan2))
RULES.rule(aten.hypot.default)(elementwise(jnp.hypot))
RULES.rule(aten.copysign.Tensor, aten.copysign.Scalar)(inexact_elementwise(jnp.copysign))
RULES.rule(aten.gcd.default)(elementwise(jnp.gcd))
RULES.rule(aten.logaddexp.default)(elementwise(jnp.logaddexp))
RULES.rule(aten.logaddexp2.default)(elementwise(jnp.logaddexp2))


@RULES.rule(aten.nextafter.default)
def nextafter(self: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.nextafter(*promote(self, other))  # never widened: the step is that of the dtype itself


@RULES.rule(aten.lcm.default)
def lcm(self: jax.Array, other: jax.Array) -> jax.Array:
    a, b = promote(self, other)
    divisor = jnp.gcd(a, b)
    return jnp.where(divisor == 0, 0, jnp.abs(a // jnp.maximum(divisor, 1) * b))


@RULES.rule(aten.ldexp.Tensor)
def ldexp(self: jax.Array, other: jax.Array) -> jax.Array:
    return mul(self, pow_tensor(2.0, other))


@RULES.rule(aten.heaviside.default)
def heaviside(self: jax.Array, values: jax.Array) -> jax.Array:
    return compute(lambda x, at_zero: jnp.where(x == 0, at_zero, (x > 0).astype(x.dtype)), self, values)


@RULES.rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(self: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    dtype = result_dtype(*(operand for operand in (self, min, max) if operand is not None))
    clamped = cast(self, dtype)
    if min is not None:
        clamped = jnp.maximum(clamped, cast(min, dtype))
    if max is not None:
        clamped = jnp.minimum(clamped, cast(max, dtype))
    return clamped


@RULES.rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(self: jax.Array, min: Operand) -> jax.Array:
    return clamp(self, min)


@RULES.rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: jax.Array, max: Operand) -> jax.Array:
    return clamp(self, None, max)


@RULES.rule(aten.nan_to_num.default)
def nan_to_num(
    self: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        return self
    return jnp.nan_to_num(self, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@RULES.rule(aten.frac.default)
def frac(self: jax.Array) -> jax.Array:
    return compute(lambda x: x - jnp.trunc(x), self)


@RULES.rule(aten.trunc.default)
def trunc(self: jax.Array) -> jax.Array:
    return jnp.trunc(self) if _is_floating(self) else self


@RULES.rule(aten.floor.default)
def floor(self: jax.Array) -> jax.Array:
    return jnp.floor(self) if _is_floating(self) else self


@RULES.rule(aten.ceil.default)
def ceil(self: jax.Array) -> jax.Array:
    return jnp.ceil(self) if _is_floating(self) else self


@RULES.rule(aten.round.default)
def round_half_even(self: jax.Array) -> jax.Array:
    return jnp.round(self) if _is_floating(self) else self


@RULES.rule(aten.round.decimals)
def round_decimals(self: jax.Array, decimals: int = 0) -> jax.Array:
    if not _is_floating(self):
        return self
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return compute(lambda x: jnp.round(x / scale) * scale, self)
    return compute(lambda x: jnp.round(x * scale) / scale, self)


def _is_floating(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


@RULES.rule(aten.deg2rad.default)
def deg2rad(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 0.017453292519943295)


@RULES.rule(aten.rad2deg.default)
def rad2deg(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 57.29577951308232)


@RULES.rule(aten.complex.default)
def complex_from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@RULES.rule(aten.polar.default)
def polar(abs: jax.Array, angle: jax.Array) -> jax.Array:
    return complex_from_parts(abs * jnp.cos(angle), abs * jnp.sin(angle))


@RULES.rule(aten._conj_physical.default)
def conj_physical(self: jax.Array) -> jax.Array:
    return jnp.conj(self)


@RULES.rule(aten.angle.default)
def angle(self: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(self):
        return jnp.arctan2(self.imag, self.real)
    # Torch keeps NaN and calls -0.0 non-negative, where arctan2 would see its sign bit.
    return compute(lambda x: jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0)), self, inexact=True)
