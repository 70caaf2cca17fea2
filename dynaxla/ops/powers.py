"""Powers with a number or a tensor as exponent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.custom_ops.schema import argument, operand_dtype
from dynaxla.ops import vector_functions
from dynaxla.ops.arithmetic import mul
from dynaxla.ops.division import divide
from dynaxla.ops.dtypes import INTEGERS_WITHOUT_BOOL, NUMBERS, WIDE_FLOATS
from dynaxla.ops.eager_errors import check_numbers_fit
from dynaxla.ops.promotion import Operand, Scalar, compute, result_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict
from dynaxla.ops.transcendental import exp, sqrt
from dynaxla.ops.vector_functions import on_cpu

aten = torch.ops.aten
OPS = OpFamily()
_float_power = on_cpu(vector_functions.power, jnp.power)


@OPS.op(aten.pow.Tensor_Tensor, dtypes=NUMBERS)
@OPS.op(aten.pow.Scalar)
def pow_tensor(self: Operand, exponent: Operand) -> jax.Array:
    return compute(_power, self, exponent)


def _is_root(call: Node) -> bool:
    return call.args[1] in _ROOTS


def check_exponent(node: Node) -> str | None:
    """Refuses powers of integers by a number that overflows their dtype or is negative."""
    dtype, exponent = node.meta["val"].dtype, argument(node, "exponent")
    if dtype not in INTEGERS_WITHOUT_BOOL or not isinstance(exponent, int):
        return None
    return "a negative power of integers" if exponent < 0 else check_numbers_fit("exponent")(node)


def _is_no_product(call: Node) -> bool:
    return call.args[1] not in _PRODUCTS


_ROOTS = (0.5, -0.5)
_PRODUCTS = (-1, 0, 1, 2, 3)  # exponents of powers that XLA replaces by products or a quotient
_COMPLEX_PRODUCTS: Mapping[Scalar, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        0: jnp.ones_like,
        1: lambda x: x,
        2: lambda x: x * x,
        3: lambda x: x * x * x,
        -1: lambda x: divide(jnp.ones_like(x), x),
        -2: lambda x: divide(jnp.ones_like(x), x * x),
        0.5: sqrt,
    }
)
"""Powers of complex numbers that eager computes without logarithms, by exponent."""

_ROOT_OF_INFINITY = Finding(
    Verdict.WRONG, WIDE_FLOATS, "(-inf) ** 0.5 is infinite, (-inf) ** -0.5 is 0", calls=_is_root
)

_BY_ELEMENTS = Finding(
    Verdict.SLOWER,
    frozenset({torch.float32}),
    "calls the C library for each element",
    frozenset({"cpu"}),
    _is_no_product,
)


@OPS.op(aten.pow.Tensor_Scalar, check=check_exponent, torch_mlir=(_ROOT_OF_INFINITY, _BY_ELEMENTS))
def pow_scalar(self: jax.Array, exponent: Scalar) -> jax.Array:
    dtype = result_dtype(self, exponent)
    if dtype in INTEGERS_WITHOUT_BOOL and isinstance(exponent, int):
        return compute(lambda x, _: lax.integer_pow(x, exponent), self, exponent)
    if dtype.is_complex and exponent in _COMPLEX_PRODUCTS:
        return compute(lambda x, _: _COMPLEX_PRODUCTS[exponent](x), self, exponent)
    if dtype.is_floating_point and exponent in _PRODUCTS:
        return compute(jnp.power, self, exponent)
    if not dtype.is_floating_point or dtype is torch.float16 or exponent not in _ROOTS:
        return pow_tensor(self, exponent)
    # Torch computes the square root here, but of float16, which differs from a power at -inf and -0.
    return compute(lambda x, _: lax.sqrt(x) if exponent == 0.5 else 1 / lax.sqrt(x), self, exponent)


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    if jnp.issubdtype(base.dtype, jnp.complexfloating):
        return _complex_power(base, exponent)
    if jnp.issubdtype(base.dtype, jnp.inexact):
        return _float_power(base, exponent)
    if base.dtype == jnp.bool_:
        return base | ~exponent
    power = _whole_power(base, jnp.maximum(exponent, 0))
    sign = jnp.where(exponent % 2 == 0, 1, base)
    inverse = jnp.where((base == 1) | (base + 1 == 0), sign, 0)
    return jnp.where(exponent < 0, inverse, power)


def _complex_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """exp(exponent * log(base)), as eager's C library has it.

    XLA's own multiplies two factors of the absolute value, of which one may be zero and the other infinite.
    """
    logarithm = jnp.log(base)
    return exp(lax.complex(*_multiply_as_c(exponent.real, exponent.imag, logarithm.real, logarithm.imag)))


def _multiply_as_c(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a + bi) (c + di) by the rules of C: where both parts would be NaN, an infinite factor is a direction."""
    real, imaginary = a * c - b * d, a * d + b * c
    first, second = jnp.isinf(a) | jnp.isinf(b), jnp.isinf(c) | jnp.isinf(d)
    to_unit = lambda x, at: jnp.where(at, jnp.copysign(jnp.isinf(x).astype(x.dtype), x), x)  # noqa: E731
    to_zero = lambda x, at: jnp.where(at & jnp.isnan(x), jnp.copysign(jnp.zeros_like(x), x), x)  # noqa: E731
    a, b = (to_zero(to_unit(x, first), second) for x in (a, b))
    c, d = (to_zero(to_unit(x, second), first) for x in (c, d))
    lost = jnp.isnan(real) & jnp.isnan(imaginary) & (first | second)
    return jnp.where(lost, jnp.inf * (a * c - b * d), real), jnp.where(lost, jnp.inf * (a * d + b * c), imaginary)


def _whole_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """Integer powers that wrap. JAX and XLA use only the low six bits of an exponent; the remaining bits are rarely set."""

    def multiply(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        power, factor, left = state
        return jnp.where(left & 1 == 1, power * factor, power), factor * factor, left >> 1

    base, exponent = jnp.broadcast_arrays(base, exponent)
    state = jnp.power(base, exponent & 63), lax.integer_pow(base, 64), exponent >> 6
    return lax.while_loop(lambda state: (state[2] != 0).any(), multiply, state)[0]


def _scales(call: Node) -> bool:
    """Whether a float is scaled by a whole power: only then eager computes no power."""
    whole = not (operand_dtype(call, "other").is_floating_point or operand_dtype(call, "other").is_complex)
    return operand_dtype(call, "self").is_floating_point and whole


def check_whole_exponent(node: Node) -> str | None:
    """Refuses a bool as the exponent of a float, for which eager has no kernel."""
    return "a bool as an exponent" if _scales(node) and operand_dtype(node, "other") is torch.bool else None


_POWER_OVERFLOWS = Finding(Verdict.WRONG, WIDE_FLOATS, "1e-8 * 2 ** 130 is infinite", calls=_scales)


@OPS.op(aten.ldexp.Tensor, check=check_whole_exponent, torch_mlir=(_POWER_OVERFLOWS,))
def ldexp(self: jax.Array, other: jax.Array) -> jax.Array:
    if not jnp.issubdtype(self.dtype, jnp.floating) or jnp.issubdtype(other.dtype, jnp.inexact):
        return mul(self, pow_tensor(2.0, other))
    exponent = other.astype(jnp.int32)  # wraps, as in eager's kernel
    return compute(lambda x: _scale(x, exponent), self)


def _scale(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2 ** exponent of a float32 or float64 x, exact where the result is a normal number, whatever the power is.

    The power is three factors, so that none of them leaves the range of x's dtype, and one that leaves it with x leaves
    it for good.
    """
    bits = 10 if x.dtype == jnp.float64 else 7
    distance = jnp.minimum(jnp.abs(jnp.maximum(exponent, 1 - 2**31)), 3 * (2**bits - 2))
    for part in (distance // 3, (distance + 1) // 3, (distance + 2) // 3):
        factor = jnp.ones_like(part, x.dtype)
        for bit in range(bits):
            step = jnp.where(exponent < 0, 2.0 ** -(2**bit), 2.0 ** (2**bit)).astype(x.dtype)
            factor = jnp.where(part >> bit & 1 == 1, factor * step, factor)
        x = x * factor
    return x
