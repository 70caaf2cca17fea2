"""Clamping and rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.ops.arithmetic import mul
from dynaxla.ops.dtypes import (
    FLOATS,
    HALVES,
    INTEGERS,
    INTEGERS_WITHOUT_BOOL,
    REAL,
    REAL_NUMBERS,
    WIDE_FLOATS,
    WIDE_INEXACT,
)
from dynaxla.ops.eager_errors import check_numbers_fit
from dynaxla.ops.promotion import (
    Operand,
    cast,
    compute,
    inexact_dtype,
    result_dtype,
    torch_dtype,
)
from dynaxla.ops.record import OpFamily, crashes, right, rounds, wrong
from dynaxla.ops.torch_mlir_verdicts import COMPUTED_OF_FLOATS, COMPUTED_OF_WIDE_FLOATS_ONLY, COMPUTED_WIDE_ONLY

aten = torch.ops.aten
OPS = OpFamily()


@OPS.op(aten.clamp.default, check=check_numbers_fit("min", "max"), dtypes=REAL, torch_mlir=COMPUTED_OF_FLOATS)
@OPS.op(aten.clamp.Tensor, dtypes=REAL, torch_mlir=(right(REAL_NUMBERS),))
def clamp(self: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    dtype = result_dtype(*(operand for operand in (self, min, max) if operand is not None))
    clamped = cast(self, dtype)
    if min is not None:
        clamped = jnp.maximum(clamped, cast(min, dtype))
    if max is not None:
        clamped = jnp.minimum(clamped, cast(max, dtype))
    return clamped


@OPS.op(aten.clamp_min.default, check=check_numbers_fit("min"), dtypes=REAL, torch_mlir=COMPUTED_OF_FLOATS)
@OPS.op(
    aten.clamp_min.Tensor,
    dtypes=REAL,
    torch_mlir=(crashes(REAL, "the process died | [(([]), bfloat16), (([2]), bfloat16)]"),),
)
def clamp_min(self: jax.Array, min: Operand) -> jax.Array:
    return clamp(self, min)


@OPS.op(aten.clamp_max.default, check=check_numbers_fit("max"), dtypes=REAL, torch_mlir=COMPUTED_OF_FLOATS)
@OPS.op(aten.clamp_max.Tensor, dtypes=REAL)
def clamp_max(self: jax.Array, max: Operand) -> jax.Array:
    return clamp(self, None, max)


@OPS.op(aten.nan_to_num.default, torch_mlir=COMPUTED_OF_WIDE_FLOATS_ONLY)
def nan_to_num(
    self: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        return self
    return jnp.nan_to_num(self, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@OPS.op(aten.frac.default, dtypes=FLOATS, torch_mlir=COMPUTED_OF_WIDE_FLOATS_ONLY)
def frac(self: jax.Array) -> jax.Array:
    return compute(lambda x: x - jnp.trunc(x), self)


@OPS.op(
    aten.trunc.default,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(INTEGERS_WITHOUT_BOOL | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def trunc(self: jax.Array) -> jax.Array:
    return jnp.trunc(self) if _is_floating(self) else self


@OPS.op(
    aten.floor.default,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(INTEGERS_WITHOUT_BOOL | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def floor(self: jax.Array) -> jax.Array:
    return jnp.floor(self) if _is_floating(self) else self


@OPS.op(
    aten.ceil.default,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(INTEGERS_WITHOUT_BOOL | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def ceil(self: jax.Array) -> jax.Array:
    return jnp.ceil(self) if _is_floating(self) else self


@OPS.op(
    aten.round.default,
    dtypes=REAL_NUMBERS,
    torch_mlir=(
        right(INTEGERS_WITHOUT_BOOL | WIDE_FLOATS),
        rounds(HALVES),
    ),
)
def round_half_even(self: jax.Array) -> jax.Array:
    return jnp.round(self) if _is_floating(self) else self


@OPS.op(aten.round.decimals, torch_mlir=COMPUTED_OF_WIDE_FLOATS_ONLY)
def round_decimals(self: jax.Array, decimals: int = 0) -> jax.Array:
    if not _is_floating(self):
        return self
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return compute(lambda x: jnp.round(x / scale) * scale, self)
    return compute(lambda x: jnp.round(x * scale) / scale, self)


def _is_floating(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


@OPS.op(aten.deg2rad.default, torch_mlir=COMPUTED_WIDE_ONLY)
def deg2rad(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 0.017453292519943295)


@OPS.op(
    aten.rad2deg.default,
    torch_mlir=(
        right(INTEGERS | {torch.float32}),
        wrong({torch.float64}, "113.67815822564296 not 113.67806220581046: [(([]), float64)]"),
        rounds(HALVES),
    ),
)
def rad2deg(self: jax.Array) -> jax.Array:
    return mul(cast(self, inexact_dtype(torch_dtype(self))), 57.29577951308232)


@OPS.op(aten.complex.default, dtypes=WIDE_INEXACT, pad=elementwise_rules.elementwise)
def complex_from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@OPS.op(aten.polar.default, dtypes=WIDE_INEXACT, pad=elementwise_rules.elementwise)
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
