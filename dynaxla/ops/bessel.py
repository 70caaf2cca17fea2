"""Bessel and Airy functions, by the formulas of the Cephes library that torch's kernels use."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import torch
from jax import lax

from dynaxla.ops import bessel_coefficients as coefficients
from dynaxla.ops.dtypes import WIDE_REAL
from dynaxla.ops.promotion import inexact_elementwise
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

Coefficients = tuple[float, ...]
Fraction = tuple[Coefficients, Coefficients]  # numerator and denominator
Wave = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Terms = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # an index, two sums, their last terms

_SQUARED_ZEROS_OF_J0 = (5.78318596294678452118, 30.4712623436620863991)
_SQUARED_ZEROS_OF_J1 = (14.6819706421238932572, 49.2184563216946036703)
_NEAR = 5.0  # up to here J and Y are rational functions of x * x, above it `_oscillating`
_AIRY_AT_ZERO, _AIRY_SLOPE_AT_ZERO = 0.355028053887817239260, -0.258819403792806798405
_AIRY_NEAR = 2.09
_AIRY_END = 103.892  # Ai is zero in float64 from here


def _polynomial(table: Coefficients, x: jax.Array) -> jax.Array:
    return jnp.polyval(jnp.array(table, x.dtype), x)


def _fraction(table: Fraction, x: jax.Array) -> jax.Array:
    return _polynomial(table[0], x) / _polynomial(table[1], x)


def _chebyshev(table: Coefficients, x: jax.Array) -> jax.Array:
    """A Chebyshev series in x / 2, by Clenshaw's algorithm."""
    last, before, sum_ = jnp.zeros_like(x), jnp.zeros_like(x), jnp.full_like(x, table[0])
    for coefficient in table[1:]:
        before, last = last, sum_
        sum_ = x * last - before + coefficient
    return (sum_ - before) / 2


# J and Y


def _oscillating(x: jax.Array, cosine: Fraction, sine: Fraction, phase: float, wave: Wave) -> jax.Array:
    """J and Y far from zero: `wave` combines two slowly varying amplitudes and an angle."""
    inverse = 5 / x
    slow = _fraction(cosine, inverse * inverse), inverse * _fraction(sine, inverse * inverse)
    return wave(*slow, x - phase) * math.sqrt(2 / math.pi) / jnp.sqrt(x)


def _of_j(p: jax.Array, q: jax.Array, angle: jax.Array) -> jax.Array:
    return p * jnp.cos(angle) - q * jnp.sin(angle)


def _of_y(p: jax.Array, q: jax.Array, angle: jax.Array) -> jax.Array:
    return p * jnp.sin(angle) + q * jnp.cos(angle)


def _j0(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    square = x * x
    first, second = _SQUARED_ZEROS_OF_J0
    near = (square - first) * (square - second) * _fraction(coefficients.J0_NEAR, square)
    far = _oscillating(x, coefficients.J0_COSINE, coefficients.J0_SINE, math.pi / 4, _of_j)
    return jnp.where(x <= _NEAR, near, far)


def _j1(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    square = size * size
    first, second = _SQUARED_ZEROS_OF_J1
    near = _fraction(coefficients.J1_NEAR, square) * size * (square - first) * (square - second)
    far = _oscillating(size, coefficients.J1_COSINE, coefficients.J1_SINE, 3 * math.pi / 4, _of_j)
    return jnp.where(x < 0, -1, 1) * jnp.where(size <= _NEAR, near, far)


def _y0(x: jax.Array) -> jax.Array:
    near = _fraction(coefficients.Y0_NEAR, x * x) + 2 / math.pi * jnp.log(x) * _j0(x)
    far = _oscillating(x, coefficients.J0_COSINE, coefficients.J0_SINE, math.pi / 4, _of_y)
    return jnp.where(x <= _NEAR, near, far)


def _y1(x: jax.Array) -> jax.Array:
    near = x * _fraction(coefficients.Y1_NEAR, x * x) + 2 / math.pi * (_j1(x) * jnp.log(x) - 1 / x)
    far = _oscillating(x, coefficients.J1_COSINE, coefficients.J1_SINE, 3 * math.pi / 4, _of_y)
    return jnp.where(x == 0, -jnp.inf, jnp.where(x <= _NEAR, near, far))


OPS.op(aten.special_bessel_j0.default, dtypes=WIDE_REAL)(inexact_elementwise(_j0))
OPS.op(aten.special_bessel_j1.default, dtypes=WIDE_REAL)(inexact_elementwise(_j1))
OPS.op(aten.special_bessel_y0.default, dtypes=WIDE_REAL)(inexact_elementwise(_y0))
OPS.op(aten.special_bessel_y1.default, dtypes=WIDE_REAL)(inexact_elementwise(_y1))


# K


def _k0(x: jax.Array, near_factor: jax.Array | float, far_factor: jax.Array | float) -> jax.Array:
    near = _chebyshev(coefficients.K0_NEAR, x * x - 2) - jnp.log(x / 2) * jsp.i0(x)
    far = _chebyshev(coefficients.K0_FAR, 8 / x - 2) / jnp.sqrt(x)
    return jnp.where(x <= 2, near * near_factor, far * far_factor)


def _k1(x: jax.Array, near_factor: jax.Array | float, far_factor: jax.Array | float) -> jax.Array:
    near = jnp.log(x / 2) * jsp.i1(x) + _chebyshev(coefficients.K1_NEAR, x * x - 2) / x
    far = _chebyshev(coefficients.K1_FAR, 8 / x - 2) / jnp.sqrt(x)
    return jnp.where(x == 0, jnp.inf, jnp.where(x <= 2, near * near_factor, far * far_factor))


OPS.op(aten.special_modified_bessel_k0.default, dtypes=WIDE_REAL)(
    inexact_elementwise(lambda x: _k0(x, 1.0, jnp.exp(-x)))
)
OPS.op(aten.special_modified_bessel_k1.default, dtypes=WIDE_REAL)(
    inexact_elementwise(lambda x: _k1(x, 1.0, jnp.exp(-x)))
)
OPS.op(aten.special_scaled_modified_bessel_k0.default, dtypes=WIDE_REAL)(
    inexact_elementwise(lambda x: _k0(x, jnp.exp(x), 1.0))
)
OPS.op(aten.special_scaled_modified_bessel_k1.default, dtypes=WIDE_REAL)(
    inexact_elementwise(lambda x: _k1(x, jnp.exp(x), 1.0))
)


# Spherical Bessel and Airy functions


def _spherical_j0(x: jax.Array) -> jax.Array:
    series = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    small = jnp.polyval(jnp.array(series, x.dtype), x * x)
    return jnp.where(jnp.isinf(x), 0, jnp.where(jnp.abs(x) < 0.5, small, jnp.sin(x) / x))


def _airy_ai(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    root = jnp.sqrt(size)
    zeta = 2 * size * root / 3
    inverse = 1 / zeta
    falling = _fraction(coefficients.AIRY_POSITIVE, inverse) / (2 * jnp.sqrt(root) * jnp.exp(zeta))
    turn = zeta + math.pi / 4
    square = inverse * inverse
    sine = 1 + square * _fraction(coefficients.AIRY_SINE, square)
    cosine = inverse * _fraction(coefficients.AIRY_COSINE, square)
    wave = (jnp.sin(turn) * sine - jnp.cos(turn) * cosine) / jnp.sqrt(root)
    far = jnp.where(x < 0, wave, falling) / math.sqrt(math.pi)
    is_near = (x >= -_AIRY_NEAR) & (x < _AIRY_NEAR)
    result = jnp.where(is_near, _airy_series(jnp.where(is_near, x, 0)), jnp.where(x > _AIRY_END, 0, far))
    return jnp.where(jnp.isfinite(x), result, jnp.nan)


def _airy_series(x: jax.Array) -> jax.Array:
    """The power series around zero, as two sums of every third power."""
    cube = x * x * x

    def goes_on(state: Terms) -> jax.Array:
        _, f, _, m, _ = state
        return jnp.any(jnp.abs(m / f) > jnp.finfo(x.dtype).eps)

    def add_terms(state: Terms) -> Terms:
        k, f, g, m, n = state
        m, n = m * cube / ((k + 2) * (k + 3)), n * cube / ((k + 3) * (k + 4))
        return k + 3, f + m, g + n, m, n

    one = jnp.ones_like(x)
    _, f, g, _, _ = lax.while_loop(goes_on, add_terms, (jnp.zeros((), x.dtype), one, x, one, x))
    return _AIRY_AT_ZERO * f + _AIRY_SLOPE_AT_ZERO * g


OPS.op(aten.special_spherical_bessel_j0.default, dtypes=WIDE_REAL)(inexact_elementwise(_spherical_j0))
OPS.op(aten.special_airy_ai.default, dtypes=WIDE_REAL)(inexact_elementwise(_airy_ai))
