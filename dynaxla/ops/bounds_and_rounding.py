"""Clamping and rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.ops.arithmetic import mul
from dynaxla.ops.dtypes import FLOATS, REAL, REAL_NUMBERS, WIDE_INEXACT
from dynaxla.ops.eager_errors import check_all, check_bounds, check_numbers_fit, check_one_dtype
from dynaxla.ops.promotion import Operand, cast, compute, inexact_dtype, result_dtype, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
OPS = OpFamily()

_NO_NEGATIVE_ZERO = Finding(Verdict.WRONG, FLOATS, "0.0, not -0.0, of -0.0")
_ROUGH_PI = Finding(Verdict.WRONG, REAL, "takes pi as 3.14159, 14 units in the last place off")


@OPS.op(aten.clamp.default, check=check_all(check_bounds, check_numbers_fit("min", "max")), dtypes=REAL)
@OPS.op(aten.clamp.Tensor, check=check_bounds, dtypes=REAL)
def clamp(self: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    dtype = result_dtype(*(operand for operand in (self, min, max) if operand is not None))
    clamped = cast(self, dtype)
    if min is not None:
        clamped = jnp.maximum(clamped, cast(min, dtype))
    if max is not None:
        clamped = jnp.minimum(clamped, cast(max, dtype))
    return clamped


@OPS.op(aten.clamp_min.default, check=check_all(check_bounds, check_numbers_fit("min")), dtypes=REAL)
@OPS.op(aten.clamp_min.Tensor, dtypes=REAL)
def clamp_min(self: jax.Array, min: Operand) -> jax.Array:
    return clamp(self, min)


@OPS.op(aten.clamp_max.default, check=check_all(check_bounds, check_numbers_fit("max")), dtypes=REAL)
@OPS.op(aten.clamp_max.Tensor, dtypes=REAL)
def clamp_max(self: jax.Array, max: Operand) -> jax.Array:
    return clamp(self, None, max)


@OPS.op(aten.nan_to_num.default)
def nan_to_num(
    self: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        return self
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@OPS.op(aten.frac.default, dtypes=FLOATS, torch_mlir=(_NO_NEGATIVE_ZERO,))
def frac(self: jax.Array) -> jax.Array:
    return compute(lambda x: x - jnp.trunc(x), self)


@OPS.op(aten.trunc.default, dtypes=REAL_NUMBERS, torch_mlir=(_NO_NEGATIVE_ZERO,))
def trunc(self: jax.Array) -> jax.Array:
    return jnp.trunc(self) if _is_floating(self) else self


@OPS.op(aten.floor.default, dtypes=REAL_NUMBERS)
def floor(self: jax.Array) -> jax.Array:
    return jnp.floor(self) if _is_floating(self) else self


@OPS.op(aten.ceil.default, dtypes=REAL_NUMBERS)
def ceil(self: jax.Array) -> jax.Array:
    return jnp.ceil(self) if _is_floating(self) else self


@OPS.op(aten.round.default, dtypes=REAL_NUMBERS)
def round_half_even(self: jax.Array) -> jax.Array:
    return jnp.round(self) if _is_floating(self) else self


@OPS.op(aten.round.decimals, dtypes=FLOATS)
def round_decimals(self: jax.Array, decimals: int = 0) -> jax.Array:
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return compute(lambda x: jnp.round(x / scale) * scale, self)
    return compute(lambda x: jnp.round(x * scale) / scale, self)


def _is_floating(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


@OPS.op(aten.deg2rad.default)
def deg2rad(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 0.017453292519943295)


@OPS.op(aten.rad2deg.default, torch_mlir=(_ROUGH_PI,))
def rad2deg(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 57.29577951308232)


@OPS.op(aten.complex.default, dtypes=WIDE_INEXACT, check=check_one_dtype, pad=elementwise_rules.elementwise)
def complex_from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@OPS.op(aten.polar.default, dtypes=WIDE_INEXACT, check=check_one_dtype, pad=elementwise_rules.elementwise)
def polar(abs: jax.Array, angle: jax.Array) -> jax.Array:
    return complex_from_parts(abs * jnp.cos(angle), abs * jnp.sin(angle))


@OPS.op(aten._conj_physical.default)
def conj_physical(self: jax.Array) -> jax.Array:
    return jnp.conj(self)


@OPS.op(aten.angle.default)
def angle(self: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(self):
        return jnp.arctan2(self.imag, self.real)
    # Torch keeps NaN and calls -0.0 non-negative, where arctan2 would see its sign bit.
    return compute(lambda x: jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0)), self, inexact=True)
