"""Arithmetic with torch's type promotion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.division import divide
from dynaxla.ops.dtypes import FLOATS, INEXACT, INT32_INT64, INTEGERS, INTEGERS_WITHOUT_BOOL, NUMBERS, REAL
from dynaxla.ops.eager_errors import (
    check_all,
    check_no_bool,
    check_numbers_fit,
    check_one_dtype,
    check_quotient_dtype,
    check_scales,
)
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
    torch_dtype,
)
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict
from dynaxla.ops.transcendental import logaddexp, logaddexp2
from dynaxla.ops.vector_functions import atan2, on_cpu

aten = torch.ops.aten
OPS = OpFamily()


@OPS.op(aten.add.Tensor, aten.add.Scalar, check=check_scales("alpha"))
def add(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return compute(lambda a, b: a + _product(b, cast(alpha, torch_dtype(b))), self, other, exact_scalars=(0, 1))


def _product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Eager multiplies complex numbers by all parts of a factor, of one, too, where XLA would do nothing: zeros have the sign
    that this leaves, and zero times infinity is NaN."""
    if not jnp.iscomplexobj(x):
        return x * factor
    real = x.real * factor.real - x.imag * factor.imag
    return lax.complex(real, x.imag * factor.real + x.real * factor.imag)


@OPS.op(
    aten.sub.Tensor, aten.sub.Scalar, check=check_all(check_scales("alpha"), check_no_bool("other")), dtypes=NUMBERS
)
def sub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(b):  # the factor is the opposite of a number: its imaginary part is a zero above zero
            return a + _product(b, cast(-alpha, torch_dtype(b)))
        return a - b * cast(alpha, torch_dtype(b))

    return compute(subtract, self, other, exact_scalars=(0, 1))


@OPS.op(
    aten.rsub.Tensor, check=check_scales("alpha"), dtypes=NUMBERS, pad=elementwise_rules.elementwise, as_aten=decompose
)
@OPS.op(aten.rsub.Scalar, check=check_all(check_scales("alpha"), check_no_bool("other")), dtypes=NUMBERS)
def rsub(self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return sub(other, self, alpha)


@OPS.op(aten.mul.Tensor, aten.mul.Scalar)
def mul(self: Operand, other: Operand) -> jax.Array:
    return compute(_product, self, other, exact_scalars=(0, 1))


@OPS.op(aten.neg.default)
def neg(self: jax.Array) -> jax.Array:
    return -self


@OPS.op(aten.abs.default, dtypes=NUMBERS)
def absolute(self: jax.Array) -> jax.Array:
    size = jnp.abs(self)
    if not jnp.iscomplexobj(self):
        return size
    is_infinite = jnp.isinf(self.real) | jnp.isinf(self.imag)  # C's hypot: whatever the other part is, NaN too
    return jnp.where(is_infinite, jnp.inf, size)


@OPS.op(aten.sign.default, dtypes=REAL)
def sign(self: jax.Array) -> jax.Array:
    if self.dtype == jnp.bool_:
        return self
    signs = (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)  # torch: the sign of NaN is 0
    return signs


@OPS.op(aten.sgn.default)
def sgn(self: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(self):
        return sign(self)
    size = jnp.abs(self)
    return jnp.where(size == 0, 0, self / size)


@OPS.op(aten.reciprocal.default)
def reciprocal(self: jax.Array) -> jax.Array:
    return compute(lambda x: divide(jnp.ones_like(x), x), self, inexact=True)


def _by_float(call: Node) -> bool:
    return isinstance(arguments_of(call)["value"], float)


_CUT_OFF = "torch's decomposition refuses a float, whose fraction eager cuts off"


@OPS.op(
    aten.addcmul.default,
    check=check_numbers_fit("value"),
    dtypes=NUMBERS,
    as_aten=decompose,
    torch_mlir=(Finding(Verdict.WRONG, INT32_INT64 | {torch.uint8}, _CUT_OFF, calls=_by_float),),
)
def addcmul(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b * c, self, tensor1, tensor2)


@OPS.op(
    aten.addcdiv.default,
    check=check_all(check_numbers_fit("value"), check_quotient_dtype),
    dtypes=NUMBERS,
    as_aten=decompose,
)
def addcdiv(self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Scalar = 1) -> jax.Array:
    return compute(lambda a, b, c: a + cast(value, torch_dtype(a)) * b / c, self, tensor1, tensor2)


@OPS.op(aten.lerp.Scalar, aten.lerp.Tensor, check=check_numbers_fit("weight"), dtypes=INEXACT, as_aten=decompose)
def lerp(self: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    dtype = opmath_dtype(torch_dtype(self))
    start, stop, step = cast(self, dtype), cast(end, dtype), cast(weight, dtype)
    near, far = start + step * (stop - start), stop - (stop - start) * (1 - step)
    return cast(jnp.where(jnp.abs(step) < 0.5, near, far), torch_dtype(self))


OPS.op(aten.maximum.default, dtypes=REAL)(elementwise(jnp.maximum))
OPS.op(aten.minimum.default, dtypes=REAL)(elementwise(jnp.minimum))
OPS.op(aten.fmax.default, dtypes=REAL)(elementwise(jnp.fmax))
OPS.op(aten.fmin.default, dtypes=REAL)(elementwise(jnp.fmin))
OPS.op(aten.atan2.default, dtypes=REAL)(inexact_elementwise(on_cpu(atan2, jnp.arctan2)))
OPS.op(aten.hypot.default, dtypes=FLOATS)(elementwise(jnp.hypot))
_NO_MAGNITUDE = Finding(Verdict.WRONG, INTEGERS, "the magnitude of the least number is taken before it is a float")
OPS.op(aten.copysign.Tensor, dtypes=REAL, torch_mlir=(_NO_MAGNITUDE,))(inexact_elementwise(jnp.copysign))
OPS.op(aten.copysign.Scalar, dtypes=REAL, as_aten=decompose, torch_mlir=(_NO_MAGNITUDE,))(
    inexact_elementwise(jnp.copysign)
)


def _gcd(a: jax.Array, b: jax.Array) -> jax.Array:
    """Euclid's algorithm, with the remainders of torch's kernels: the least number has no magnitude, so they may be below zero.

    JAX's never ends for the least number and 3.
    """

    def divide(pair: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        a, b = pair
        return jnp.where(a == 0, 0, lax.rem(b, jnp.where(a == 0, 1, a))), jnp.where(a == 0, b, a)

    pair: tuple[jax.Array, ...] = tuple(map(jnp.abs, jnp.broadcast_arrays(a, b)))
    found: jax.Array = lax.while_loop(lambda pair: jnp.any(pair[0] != 0), divide, pair)[1]
    return found


OPS.op(aten.gcd.default, dtypes=INTEGERS_WITHOUT_BOOL)(elementwise(_gcd))
OPS.op(aten.logaddexp.default, dtypes=FLOATS)(elementwise(logaddexp))
OPS.op(aten.logaddexp2.default, dtypes=FLOATS)(elementwise(logaddexp2))


@OPS.op(aten.nextafter.default, dtypes=FLOATS)
def nextafter(self: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.nextafter(*promote(self, other))  # not widened: the step depends on the dtype


@OPS.op(aten.lcm.default, dtypes=INTEGERS)
def lcm(self: jax.Array, other: jax.Array) -> jax.Array:
    dtype = result_dtype(self, other)
    # C++ computes narrower integers in 32 bits and truncates the result.
    a, b = (
        cast(each, torch.int32 if dtype.itemsize < 4 and dtype != torch.bool else dtype)
        for each in promote(self, other)
    )
    divisor = _gcd(a, b)
    return cast(jnp.where(divisor == 0, 0, jnp.abs(lax.div(a, jnp.where(divisor == 0, 1, divisor)) * b)), dtype)


@OPS.op(aten.heaviside.default, check=check_one_dtype, dtypes=REAL)
def heaviside(self: jax.Array, values: jax.Array) -> jax.Array:
    return compute(lambda x, at_zero: jnp.where(x == 0, at_zero, (x > 0).astype(x.dtype)), self, values)
