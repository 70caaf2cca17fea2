"""The error function and what is made of it; in float32 also far from zero within a few units in the last place.

XLA's erfc squares its argument and rounds before exp, which costs 60 units in the last place at 9; its erfinv rounds 1 - x^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import torch
from jax import lax

from dynaxla.ops.chebyshev_fit import ChebyshevFit
from dynaxla.ops.dtypes import REAL, WIDE_REAL
from dynaxla.ops.promotion import inexact_elementwise
from dynaxla.ops.record import OpFamily
from dynaxla.ops.transcendental import log1p

aten = torch.ops.aten
OPS = OpFamily()
Array = jax.Array

_LAST = 11.0
"""erfc of more is zero in float32."""
_ERFCX_FIT = ChebyshevFit(lambda place: _true_erfcx(4 / place - 4), 11, (4 / (_LAST + 4), 4 / 4.5))
"""erfcx(x) for x from 1/2 to 11, of 4 / (x + 4)."""
# erfcx(x) = (1 - 1/2 t + 3/4 t^2 - ...) / (x sqrt(pi)), t = 1 / x^2 (DLMF 7.12.1); from the last term to the first.
_ERFCX_SERIES = tuple((-1) ** k * math.prod(range(1, 2 * k, 2)) / 2**k for k in range(8, -1, -1))
# M. Giles, "Approximating the erfinv function" (2011), table 5: erfinv(x) = x p(w), w = -log(1 - x^2), from the last term
# to the first: of w - 2.5 for w < 5, else of sqrt(w) - 3.
_ERFINV_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ERFINV_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _true_erfcx(x: float) -> float:
    return math.erfc(x) * math.exp(x * x)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    return jnp.polyval(jnp.array(coefficients, x.dtype), x)


def erfc(x: Array) -> Array:
    """erfc(x); of float32, exp(-x^2) erfcx(x) from 1/2 on."""
    if x.dtype != jnp.float32:
        return jsp.erfc(x)
    size = jnp.clip(jnp.abs(x), 0.5, _LAST)
    tail = _exp_of_square(size, -1) * _ERFCX_FIT(4 / (size + 4))
    far = jnp.where(x > _LAST, 0, tail)
    return jnp.where(jnp.abs(x) < 0.5, 1 - lax.erf(x), jnp.where(x < 0, 2 - tail, jnp.where(jnp.isnan(x), x, far)))


def _exp_of_square(x: Array, sign: int) -> Array:
    """exp(sign x^2) of float32 from 0 to 11: the square of x's first twelve bits is exact, the rest is a small factor."""
    first = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -4096, jnp.float32)
    rest = sign * ((x - first) * (x + first))
    return jnp.exp(sign * (first * first)) * _polynomial((1 / 120, 1 / 24, 1 / 6, 1 / 2, 1, 1), rest)


def erfcx(x: Array) -> Array:
    """erfcx(x) = exp(x^2) erfc(x); JAX's is 0 where erfc(x) is a subnormal number, which XLA takes for zero."""
    far = x > (16 if x.dtype == jnp.float64 else 5)  # the series has its dtype's precision from there on
    near, large = jnp.where(far, 0, x), jnp.where(far, x, 1)
    series = _polynomial(_ERFCX_SERIES, 1 / (large * large)) / (large * math.sqrt(math.pi))
    if x.dtype != jnp.float32:
        return jnp.where(far, series, jnp.exp(near * near) * jsp.erfc(near))
    size = jnp.clip(jnp.abs(near), 0, _LAST)
    middle = jnp.where(size < 0.5, _exp_of_square(size, 1) * (1 - lax.erf(size)), _ERFCX_FIT(4 / (size + 4)))
    below = jnp.where(near < -_LAST, jnp.inf, 2 * _exp_of_square(size, 1) - middle)
    return jnp.where(jnp.isnan(x), x, jnp.where(far, series, jnp.where(near < 0, below, middle)))


def erfinv(x: Array) -> Array:
    """erfinv(x); of float32 by Giles' polynomials, with log(1 - x^2) as log(1 - x) + log(1 + x), which loses nothing near 1."""
    if x.dtype != jnp.float32:
        return jsp.erfinv(x)
    w = -log1p(-jnp.abs(x)) - log1p(jnp.abs(x))
    centre, tail = _polynomial(_ERFINV_CENTRE, w - 2.5), _polynomial(_ERFINV_TAIL, jnp.sqrt(w) - 3)
    return jnp.where(jnp.abs(x) == 1, x * jnp.inf, x * jnp.where(w < 5, centre, tail))


OPS.op(aten.erf.default, dtypes=REAL)(inexact_elementwise(jsp.erf))
OPS.op(aten.erfc.default, dtypes=REAL)(inexact_elementwise(erfc))
OPS.op(aten.erfinv.default, dtypes=REAL)(inexact_elementwise(erfinv))
OPS.op(aten.special_erfcx.default, dtypes=WIDE_REAL)(inexact_elementwise(erfcx))
OPS.op(aten.special_ndtri.default, dtypes=WIDE_REAL)(inexact_elementwise(jsp.ndtri))


@OPS.op(aten.special_log_ndtr.default, dtypes=WIDE_REAL)
def log_ndtr(x: Array) -> Array:
    """log((1 + erf(x / sqrt 2)) / 2), by the accurate formula on each side of 0."""

    def of(x: Array) -> Array:
        t = x * math.sqrt(0.5)
        return jnp.where(x < -1, jnp.log(erfcx(-t) / 2) - t * t, log1p(-erfc(t) / 2))

    return inexact_elementwise(of)(x)  # type: ignore[no-any-return]
