"""Quotients, rounded or not, and remainders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import REAL, REAL_NUMBERS
from dynaxla.ops.eager_errors import check_all, check_divisor, check_whole_quotient
from dynaxla.ops.promotion import Operand, compute, result_dtype, round_to
from dynaxla.ops.record import OpFamily
from dynaxla.ops.vector_functions import fmod as fmod_float32
from dynaxla.ops.vector_functions import on_cpu

aten = torch.ops.aten
OPS = OpFamily()
rem = on_cpu(fmod_float32, lax.rem)
"""The remainder of a quotient cut to a whole number, of arrays of one shape."""


@OPS.op(aten.div.Tensor, aten.div.Scalar)
def div(self: Operand, other: Operand) -> jax.Array:
    return compute(divide, self, other, inexact=True, exact_scalars=(0, 1))


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient; of complex numbers by the ratio of the divisor's smaller part to the larger, as eager and numpy have it."""
    if not jnp.iscomplexobj(b):
        return a / b
    is_flat = jnp.abs(b.real) >= jnp.abs(b.imag)
    large, small = jnp.where(is_flat, b.real, b.imag), jnp.where(is_flat, b.imag, b.real)
    first, second = jnp.where(is_flat, a.real, a.imag), jnp.where(is_flat, a.imag, a.real)
    ratio = small / large
    scale = 1 / (large + small * ratio)
    imaginary = jnp.where(is_flat, second - first * ratio, first * ratio - second)
    quotient = lax.complex((first + second * ratio) * scale, imaginary * scale)
    by_zero = lax.complex(a.real / jnp.abs(b.real), a.imag / jnp.abs(b.real))
    return jnp.where(b == 0, by_zero, quotient)


@OPS.op(aten.div.Tensor_mode, check=check_whole_quotient)
@OPS.op(aten.div.Scalar_mode, check=check_all(check_whole_quotient, check_divisor))
def div_mode(self: Operand, other: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        return div(self, other)
    if rounding_mode == "floor":
        return compute(_floor_div, self, other, exact_scalars=(1,))
    # torch rounds the quotient to 16 bits before it cuts off, but not that by a number.
    dtype, has_dims = result_dtype(self, other), isinstance(other, jax.Array) and other.ndim > 0
    dtype = dtype if has_dims or not dtype.is_floating_point else torch.float32
    return compute(lambda a, b: _trunc_div(a, b, dtype), self, other, exact_scalars=(1,))


@OPS.op(aten.floor_divide.default, aten.floor_divide.Scalar, check=check_divisor, pad=elementwise_rules.elementwise)
def floor_divide(self: Operand, other: Operand) -> jax.Array:
    return compute(_floor_div, self, other, exact_scalars=(1,))


@OPS.op(aten.remainder.Tensor, dtypes=REAL_NUMBERS)
@OPS.op(aten.remainder.Scalar, aten.remainder.Scalar_Tensor, check=check_divisor, dtypes=REAL)
def remainder(self: Operand, other: Operand) -> jax.Array:
    return compute(_python_mod, self, other)


@OPS.op(aten.fmod.Tensor, dtypes=REAL_NUMBERS)
@OPS.op(aten.fmod.Scalar, check=check_divisor, dtypes=REAL)
def fmod(self: Operand, other: Operand) -> jax.Array:
    return compute(lambda a, b: rem(*jnp.broadcast_arrays(a, b)), self, other)


def _python_mod(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = jnp.broadcast_arrays(a, b)
    mod = rem(a, b)
    return jnp.where((mod != 0) & ((mod < 0) != (b < 0)), mod + b, mod)


def _trunc_div(a: jax.Array, b: jax.Array, dtype: torch.dtype) -> jax.Array:
    quotient = lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(round_to(quotient, dtype)) if dtype.is_floating_point else quotient


def _floor_div(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = jnp.broadcast_arrays(a, b)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        mod = lax.rem(a, b)
        return lax.div(a, b) - ((mod != 0) & ((mod < 0) != (b < 0))).astype(a.dtype)
    mod = rem(a, b)
    quotient = (a - mod) / b
    quotient = jnp.where((mod != 0) & ((mod < 0) != (b < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    # The division above is only nearly exact: round to the nearest integer, not below it.
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(a), a / b), floored)
    return jnp.where(b == 0, a / b, floored)
