"""Powers, by a number or by a tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.ops.arithmetic import mul
from dynaxla.ops.dtypes import HALVES, NUMBERS, WHOLE_NUMBERS, WIDE_FLOATS, WORDS
from dynaxla.ops.findings import COMPUTED_ROUGHLY
from dynaxla.ops.promotion import Operand, Scalar, compute, result_dtype
from dynaxla.ops.record import Family, right, rounds, wrong

aten = torch.ops.aten
OPS = Family()


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


@OPS.op(aten.ldexp.Tensor, torch_mlir=COMPUTED_ROUGHLY)
def ldexp(self: jax.Array, other: jax.Array) -> jax.Array:
    return mul(self, pow_tensor(2.0, other))
