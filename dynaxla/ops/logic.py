"""Bitwise and logical ops, comparisons, selection and classification of numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import INTEGERS, INTEGERS_WITHOUT_BOOL, REAL, STORED
from dynaxla.ops.eager_errors import check_real_number
from dynaxla.ops.promotion import Operand, cast, elementwise, promote
from dynaxla.ops.record import Body, OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def _comparison(function: Callable[..., jax.Array]) -> Body:
    return lambda self, other: function(*promote(self, other))


OPS.op(aten.eq.Tensor)(_comparison(jnp.equal))
OPS.op(aten.eq.Scalar)(_comparison(jnp.equal))
OPS.op(aten.ne.Tensor, aten.ne.Scalar)(_comparison(jnp.not_equal))
for _packet, _function in (
    (aten.lt, jnp.less),
    (aten.le, jnp.less_equal),
    (aten.gt, jnp.greater),
    (aten.ge, jnp.greater_equal),
):
    OPS.op(_packet.Tensor, dtypes=REAL)(_comparison(_function))
    OPS.op(_packet.Scalar, check=check_real_number, dtypes=REAL)(_comparison(_function))

OPS.op(aten.bitwise_and.Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_and))
OPS.op(aten.bitwise_and.Scalar, dtypes=INTEGERS)(elementwise(jnp.bitwise_and))
OPS.op(aten.bitwise_and.Scalar_Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_and))
OPS.op(aten.bitwise_or.Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_or))
OPS.op(aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_or))
OPS.op(aten.bitwise_xor.Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_xor))
OPS.op(aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor, dtypes=INTEGERS)(elementwise(jnp.bitwise_xor))
OPS.op(aten.bitwise_not.default, dtypes=INTEGERS)(elementwise(jnp.bitwise_not))


def _logical(function: Callable[..., jax.Array]) -> Body:
    """A logical op; JAX's take the real part alone of a complex number for its truth."""

    def run(*operands: jax.Array) -> jax.Array:
        return function(*(x != 0 if jnp.iscomplexobj(x) else x for x in operands))

    return run


OPS.op(aten.logical_and.default)(_logical(jnp.logical_and))
OPS.op(aten.logical_or.default)(_logical(jnp.logical_or))
OPS.op(aten.logical_xor.default)(_logical(jnp.logical_xor))
OPS.op(aten.logical_not.default)(_logical(jnp.logical_not))


@OPS.op(aten.bitwise_left_shift.Tensor, dtypes=INTEGERS_WITHOUT_BOOL)
@OPS.op(aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor, dtypes=INTEGERS)
@OPS.op(aten.__lshift__.Tensor, aten.__lshift__.Scalar)
def left_shift(self: Operand, other: Operand) -> jax.Array:
    a, b = jnp.broadcast_arrays(*promote(self, other))
    in_range = (b >= 0) & (b < a.dtype.itemsize * 8)
    return jnp.where(in_range, lax.shift_left(a, jnp.where(in_range, b, 0)), 0)


@OPS.op(aten.bitwise_right_shift.Tensor, dtypes=INTEGERS_WITHOUT_BOOL)
@OPS.op(aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor, dtypes=INTEGERS)
@OPS.op(aten.__rshift__.Tensor, aten.__rshift__.Scalar)
def right_shift(self: Operand, other: Operand) -> jax.Array:
    a, b = jnp.broadcast_arrays(*promote(self, other))
    is_signed = jnp.issubdtype(a.dtype, jnp.signedinteger)
    bits = a.dtype.itemsize * 8
    in_range = (b >= 0) & (b < bits)
    if not is_signed:
        return jnp.where(in_range, lax.shift_right_logical(a, jnp.where(in_range, b, 0)), 0)
    # Torch limits a too large shift to the dtype's width, which leaves the sign bit everywhere.
    return lax.shift_right_arithmetic(a, jnp.where(in_range, b, bits - 1))


@OPS.op(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    dtypes=STORED,
    pad=elementwise_rules.elementwise,
)
def where(condition: jax.Array, self: Operand, other: Operand) -> jax.Array:
    kept, replacement = promote(self, other)
    return jnp.where(cast(condition, torch.bool), kept, replacement)


OPS.op(aten.isnan.default)(jnp.isnan)
OPS.op(aten.isinf.default)(jnp.isinf)
OPS.op(aten.isposinf.default)(jnp.isposinf)
OPS.op(aten.isneginf.default)(jnp.isneginf)


@OPS.op(aten.signbit.default, dtypes=REAL)
def signbit(self: jax.Array) -> jax.Array:
    if jnp.issubdtype(self.dtype, jnp.floating):
        return jnp.signbit(self)
    return jnp.zeros(self.shape, jnp.bool_) if self.dtype == jnp.bool_ else self < 0
