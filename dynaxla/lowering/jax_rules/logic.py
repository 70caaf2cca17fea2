"""JAX rules of the bitwise, logical, comparing, selecting and classifying ATen ops."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.lowering.jax_rules.promotion import Operand, cast, elementwise, promote
from dynaxla.lowering.jax_rules.rule_set import Rule, RuleSet

aten = torch.ops.aten
RULES = RuleSet()


def _comparison(function: Callable[..., jax.Array]) -> Rule:
    return lambda self, other: function(*promote(self, other))


RULES.rule(aten.eq.Tensor, aten.eq.Scalar)(_comparison(jnp.equal))
RULES.rule(aten.ne.Tensor, aten.ne.Scalar)(_comparison(jnp.not_equal))
RULES.rule(aten.lt.Tensor, aten.lt.Scalar)(_comparison(jnp.less))
RULES.rule(aten.le.Tensor, aten.le.Scalar)(_comparison(jnp.less_equal))
RULES.rule(aten.gt.Tensor, aten.gt.Scalar)(_comparison(jnp.greater))
RULES.rule(aten.ge.Tensor, aten.ge.Scalar)(_comparison(jnp.greater_equal))

RULES.rule(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor)(
    elementwise(jnp.bitwise_and)
)
RULES.rule(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor)(elementwise(jnp.bitwise_or))
RULES.rule(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor)(
    elementwise(jnp.bitwise_xor)
)
RULES.rule(aten.bitwise_not.default)(elementwise(jnp.bitwise_not))
RULES.rule(aten.logical_and.default)(jnp.logical_and)
RULES.rule(aten.logical_or.default)(jnp.logical_or)
RULES.rule(aten.logical_xor.default)(jnp.logical_xor)
RULES.rule(aten.logical_not.default)(jnp.logical_not)


@RULES.rule(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
def left_shift(self: Operand, other: Operand) -> jax.Array:
    a, b = jnp.broadcast_arrays(*promote(self, other))
    in_range = (b >= 0) & (b < a.dtype.itemsize * 8)
    return jnp.where(in_range, lax.shift_left(a, jnp.where(in_range, b, 0)), 0)


@RULES.rule(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def right_shift(self: Operand, other: Operand) -> jax.Array:
    a, b = jnp.broadcast_arrays(*promote(self, other))
    is_signed = jnp.issubdtype(a.dtype, jnp.signedinteger)
    bits = a.dtype.itemsize * 8
    in_range = (b >= 0) & (b < bits)
    if not is_signed:
        return jnp.where(in_range, lax.shift_right_logical(a, jnp.where(in_range, b, 0)), 0)
    # Torch shifts too far by shifting as far as possible, which leaves the sign bit everywhere.
    return lax.shift_right_arithmetic(a, jnp.where(in_range, b, bits - 1))


@RULES.rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(condition: jax.Array, self: Operand, other: Operand) -> jax.Array:
    kept, replacement = promote(self, other)
    return jnp.where(cast(condition, torch.bool), kept, replacement)


RULES.rule(aten.isnan.default)(jnp.isnan)
RULES.rule(aten.isinf.default)(jnp.isinf)
RULES.rule(aten.isposinf.default)(jnp.isposinf)
RULES.rule(aten.isneginf.default)(jnp.isneginf)


@RULES.rule(aten.signbit.default)
def signbit(self: jax.Array) -> jax.Array:
    if jnp.issubdtype(self.dtype, jnp.floating):
        return jnp.signbit(self)
    return jnp.zeros(self.shape, jnp.bool_) if self.dtype == jnp.bool_ else self < 0
