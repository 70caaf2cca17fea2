"""The regularized incomplete gamma functions, computed in float64 and rounded to the operands' dtype.

In float32 JAX's series and continued fraction lose three digits at a = 100, and all from a = 100,000 on; in float64 they do so
from a = 1e9 on. Where a is large and x near it, Temme's expansion is taken instead (DLMF 8.12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import torch

from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.promotion import compute
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

_LARGE = 1e4
"""From this a on, four powers of 1/a are exact to the last digits of float64."""
_NEAR = 0.3
"""How far x may be from a, relative to it. Farther off, results for so large an a are 0 or 1."""
_STIRLING = (Fraction(1), Fraction(1, 12), Fraction(1, 288), Fraction(-139, 51840))
"""The coefficients of the gamma function's series in 1/a (DLMF 5.11.3)."""
_TERMS = 16


@OPS.op(aten.igamma.default, dtypes=FLOATS)
def igamma(self: jax.Array, other: jax.Array) -> jax.Array:
    return compute(lambda a, x: _evaluate(a, x, jsp.gammainc, -1.0), self, other, inexact=True)


@OPS.op(aten.igammac.default, dtypes=FLOATS)
def igammac(self: jax.Array, other: jax.Array) -> jax.Array:
    return compute(lambda a, x: _evaluate(a, x, jsp.gammaincc, 1.0), self, other, inexact=True)


def _evaluate(a: jax.Array, x: jax.Array, series: Callable[..., jax.Array], side: float) -> jax.Array:
    """The lower function if `side` is -1, the upper one if it is 1; at the edges torch's numbers."""
    dtype = a.dtype
    a, x = jnp.broadcast_arrays(a.astype(jnp.float64), x.astype(jnp.float64))
    distance = (x - a) / a
    is_near = (a > _LARGE) & (jnp.abs(distance) < _NEAR)
    near = _expand(jnp.where(is_near, a, _LARGE), jnp.where(is_near, distance, 0), side)
    is_inside = ~is_near & (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    others = series(jnp.where(is_inside, a, 1), jnp.where(is_inside, x, 1))
    at_zero, at_infinity = (0.0, 1.0) if side < 0 else (1.0, 0.0)
    edges = (
        ((x < 0) | (a < 0) | ((a == 0) & ~(x > 0)) | (jnp.isinf(a) & jnp.isinf(x)), jnp.nan),
        ((a == 0) | (jnp.isinf(x) & ~jnp.isinf(a)), at_infinity),
        ((x == 0) | jnp.isinf(a), at_zero),
        (jnp.isnan(a) | jnp.isnan(x), jnp.nan),
    )
    inside = jnp.where(is_near, near, others)
    return jnp.select([where for where, _ in edges], [value for _, value in edges], inside).astype(dtype)


def _expand(a: jax.Array, distance: jax.Array, side: float) -> jax.Array:
    """Temme's expansion, for x = a * (1 + distance)."""
    small = jnp.abs(distance) < 0.01  # where the logarithm would cancel
    power = jnp.polyval(jnp.array([(-1) ** n / (n + 2) for n in range(7, -1, -1)]), distance) * distance**2
    half_square = jnp.where(small, power, distance - jnp.log1p(distance))
    eta = jnp.sign(distance) * jnp.sqrt(2 * half_square)
    series = jnp.zeros_like(eta)
    for coefficients in reversed(_temme_coefficients()):
        series = series / a + jnp.polyval(jnp.array(coefficients[::-1]), eta)
    rest = jnp.exp(-a * half_square) / jnp.sqrt(2 * jnp.pi * a) * series
    return 0.5 * jsp.erfc(side * eta * jnp.sqrt(a / 2)) + side * rest


@cache
def _temme_coefficients() -> tuple[tuple[float, ...], ...]:
    """By power of 1/a, the coefficients of the powers of eta (DLMF 8.12.9 to 8.12.12)."""
    count = _TERMS + 2 * len(_STIRLING) + 1
    mu = [Fraction(0), Fraction(1)]  # the distance in powers of eta: mu * mu' = eta * (1 + mu)
    for n in range(2, count + 1):
        products = sum((mu[i] * mu[n + 1 - i] for i in range(2, n)), Fraction(0))
        mu.append(mu[n - 1] / (n + 1) - products / 2)
    inverse = _invert(mu[1:])  # of eta / mu
    series = [inverse[1:]]  # of 1 / mu - 1 / eta
    for k, number in enumerate(_STIRLING[1:], start=1):
        slopes = ((n + 2) * each for n, each in enumerate(series[-1][2:]))
        series.append([one + (-1) ** k * number * other for one, other in zip(slopes, inverse[1:], strict=False)])
    return tuple(tuple(float(each) for each in row[:_TERMS]) for row in series)


def _invert(series: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of 1 / series."""
    made: list[Fraction] = [1 / series[0]]
    for n in range(1, len(series)):
        made.append(-sum((series[i] * made[n - i] for i in range(1, n + 1)), Fraction(0)) / series[0])
    return made
