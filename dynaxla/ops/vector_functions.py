"""Trigonometric functions, powers, logarithms of 1 + x and remainders of float32 on the CPU.

XLA's compiler calls the C library for each element of most of them, which takes 12 to 46 ns an element. These are arithmetic
alone, which is compiled for vectors: 0.3 to 7 ns. Much of it is in float64, so that results are within about a rounding of
float32; other dtypes and other platforms have XLA's functions. XLA writes a quotient that several ops read to memory, so
here one `where` reads each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from dynaxla.ops.chebyshev_fit import ChebyshevFit
from dynaxla.runtime.executable_info import ANY_LAST_BIT

Array = jax.Array

_BITS = 29  # of a piece of 2 / pi: times the 24 bits of a float32 they fit into the 53 of a float64
_PIECES = 4
_RANGES = (0, 32, 64, 96)
"""Where |x| >= 2 ** (k + 23), x is a multiple of 2 ** k."""
_ATAN_FIT = ChebyshevFit(lambda square: math.atan(math.sqrt(square)) / math.sqrt(square), 13, (0.0, 1.0))
"""atan(r) / r for r from 0 to 1, of r^2."""
_LOG_2 = (0.693359375, math.log(2) - 0.693359375)
"""log(2) as a number of 11 bits, of which multiples by whole numbers are exact in float32, and the rest."""
_WHOLE = 2.0**28  # below it, quotients of float32 are cut in float64 to the right whole number or one beside it


def on_cpu(function: Callable[..., Array], default: Callable[..., Array]) -> Callable[..., Array]:
    """The function of float32 arrays on the CPU, and `default` of others and elsewhere."""

    @functools.wraps(default)
    def choose(*arrays: Array) -> Array:
        if any(array.dtype != jnp.float32 for array in arrays):
            return default(*arrays)
        result: Array = lax.platform_dependent(*arrays, cpu=function, default=default)
        return result

    return choose


def sin(x: Array) -> Array:
    """sin(x), within 1.5 units in the last place; that of a subnormal number is the number."""
    quadrant, angle = _reduce(x)
    return jnp.where(jnp.abs(x) < 2.0**-12, x, _sine(quadrant, angle.astype(jnp.float32)))


def cos(x: Array) -> Array:
    """cos(x), within 1.5 units in the last place."""
    quadrant, angle = _reduce(x)
    return _sine(quadrant + 1, angle.astype(jnp.float32))


def tan(x: Array) -> Array:
    """tan(x), within 0.6 units in the last place."""
    quadrant, angle = _reduce(x)
    sine, cosine = _sine_and_cosine(angle)
    is_odd = quadrant & 1 == 1
    ratio = divide_freely(jnp.where(is_odd, -cosine, sine), jnp.where(is_odd, sine, cosine))
    return jnp.where(jnp.abs(x) < 2.0**-12, x, ratio.astype(jnp.float32))


def atan(x: Array) -> Array:
    """atan(x), within 0.6 units in the last place."""
    return atan2(x, jnp.ones_like(x))


def atan2(y: Array, x: Array) -> Array:
    """The angle of the point (x, y), within 0.6 units in the last place; that of two subnormal numbers is one of zeros."""
    return _angle(y.astype(jnp.float64), x.astype(jnp.float64))


def asin(x: Array) -> Array:
    """asin(x), within 0.6 units in the last place."""
    wide = x.astype(jnp.float64)
    return _angle(wide, jnp.sqrt((1 - wide) * (1 + wide)))


def acos(x: Array) -> Array:
    """acos(x), within 0.6 units in the last place."""
    wide = x.astype(jnp.float64)
    return _angle(jnp.sqrt((1 - wide) * (1 + wide)), wide)


def _angle(y: Array, x: Array) -> Array:
    """The angle, in float32, of a point in float64."""
    rise, run = jnp.abs(y), jnp.abs(x)
    least, most = jnp.minimum(rise, run), jnp.maximum(rise, run)
    is_equal = least == most  # zeros and infinities, too
    ratio = jnp.where(is_equal, jnp.where(most == 0, 0.0, 1.0), divide_freely(least, most))
    angle = ratio * _ATAN_FIT(ratio * ratio)
    angle = jnp.where(rise > run, math.pi / 2 - angle, angle)
    angle = jnp.where(jnp.signbit(x), math.pi - angle, angle)
    angle = jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, angle)
    return jnp.copysign(angle, y).astype(jnp.float32)


def power(base: Array, exponent: Array) -> Array:
    """base ** exponent, rounded once, with the exceptions of C's `pow`; a subnormal base counts as zero."""
    base, exponent = jnp.broadcast_arrays(base, exponent)
    magnitude, wide = jnp.abs(base), exponent.astype(jnp.float64)
    logarithm = jnp.where(magnitude < jnp.inf, _log(magnitude), magnitude.astype(jnp.float64))
    logarithm = jnp.where(magnitude == 0, -jnp.inf, logarithm)
    is_one = (logarithm == 0) & ~jnp.isnan(wide)  # (-1) ** infinity is 1
    is_whole, half = jnp.trunc(exponent) == exponent, exponent * 0.5
    is_odd = is_whole & (jnp.trunc(half) != half)
    sign = jnp.where(is_odd & jnp.signbit(base), -1.0, 1.0)
    sign = jnp.where((base < 0) & (base > -jnp.inf) & ~is_whole, jnp.nan, sign)
    result = jnp.exp(jnp.where(is_one, 0.0, wide * logarithm)) * sign
    return jnp.where((exponent == 0) | (base == 1), 1.0, result).astype(jnp.float32)


def exp2(x: Array) -> Array:
    """2 ** x, within 1 unit in the last place, by Taylor's series of the part of x that is not whole."""
    near = jnp.clip(x, -160, 160)  # beyond, the result is 0 or infinite
    whole = jnp.round(near)
    power = _evaluate([math.log(2) ** n / math.factorial(n) for n in range(8)], near - whole)
    steps = whole.astype(jnp.int32)
    return power * _two_to(steps >> 1) * _two_to(steps - (steps >> 1))


def log1p(x: Array) -> Array:
    """log(1 + x), within 1.5 units in the last place.

    1 + x is m 2^k, m from sqrt(1/2) to sqrt(2), plus what the sum lost, which is added to m - 1. log(1 + f) is
    f - (f^2 / 2 - s (f^2 / 2 + R(s^2))) with s = f / (2 + f) and R(q) = 2/3 q + 2/5 q^2 + ..., the series of 2 artanh(s)
    (as FreeBSD's msun has it). The sum is read by its bits alone, or XLA would cancel 1 + x - 1.
    """
    total = 1 + x
    k, m = _split(total)
    scale = _two_to(-k)
    lost = jnp.where(x > 1, scale - (m - x * scale), x * scale - (m - scale))
    f = (m - 1) + jnp.where(x < 2.0**25, lost, 0)  # of a larger sum it is below a rounding
    s, half = divide_freely(f, 2 + f), 0.5 * f * f
    q = s * s
    correction = s * (half + q * _evaluate([2 / 3, 2 / 5, 2 / 7, 2 / 9], q))
    power = k.astype(jnp.float32)
    result = power * _LOG_2[0] - ((half - (correction + power * _LOG_2[1])) - f)
    result = jnp.where(total == 1, x, result)
    result = jnp.where(x > -1, result, jnp.where(x == -1, np.float32(-np.inf), np.float32(np.nan)))
    return jnp.where(x == jnp.inf, x, result)


def fmod(a: Array, b: Array) -> Array:
    """The remainder of a / b cut to a whole number, exact, with the sign of a, as C's `fmod`.

    If a quotient is 2^28 or more, all of them are XLA's: products with a smaller one have few enough bits for float64.
    """
    size, divisor = jnp.abs(a.astype(jnp.float64)), jnp.abs(b.astype(jnp.float64))
    quotient = jnp.trunc(divide_freely(size, divisor))
    left = size - quotient * divisor
    left = jnp.where(left < 0, left + divisor, jnp.where(left >= divisor, left - divisor, left))
    left = jnp.where(jnp.isinf(divisor), size, left)
    left = jnp.where((divisor == 0) | jnp.isinf(size), jnp.nan, left)
    is_small = (quotient < _WHOLE) | jnp.isnan(left)
    exact = jnp.copysign(left.astype(jnp.float32), a)
    result: Array = lax.cond(jnp.all(is_small), lambda: exact, lambda: lax.rem(a, b))
    return result


def divide_freely(a: Array, b: Array) -> Array:
    """a / b, whose last bit XLA may change (`exact_division`)."""
    with set_xla_metadata(**{ANY_LAST_BIT: "true"}):
        return a / b


def _two_to(power: Array) -> Array:
    """2 ** power, of whole numbers from -126 to 127."""
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


def _split(x: Array) -> tuple[Array, Array]:
    """A normal positive number as a power of two (int32) and a factor from sqrt(1/2) to sqrt(2)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    power = (bits - np.float32(math.sqrt(0.5)).view(np.int32)) >> 23
    return power, lax.bitcast_convert_type(bits - (power << 23), jnp.float32)


def _log(x: Array) -> Array:
    """The natural logarithm, in float64, of normal positive numbers: log(m 2^k) = k log(2) + 2 artanh((m - 1) / (m + 1))."""
    power, factor = _split(x)
    m = factor.astype(jnp.float64)
    ratio = jnp.where(x > 0, divide_freely(m - 1, m + 1), 0.0)
    series = _evaluate([2 / (2 * n + 1) for n in range(8)], ratio * ratio)
    return power.astype(jnp.float64) * math.log(2) + ratio * series


def _sine(quadrant: Array, angle: Array) -> Array:
    """The sine of a number of quarter turns and an angle."""
    sine, cosine = _sine_and_cosine(angle)
    value = jnp.where(quadrant & 1 == 0, sine, cosine)
    return jnp.where(quadrant & 2 == 0, value, -value)


def _sine_and_cosine(angle: Array) -> tuple[Array, Array]:
    """Of angles from -pi/4 to pi/4, by Taylor's series to the 9th and 10th power, and two terms more in float64."""
    terms = 5 if angle.dtype == jnp.float32 else 7
    square = angle * angle
    sines = [(-1) ** n / math.factorial(2 * n + 1) for n in range(1, terms)]
    cosines = [(-1) ** n / math.factorial(2 * n) for n in range(1, terms + 1)]
    sine = angle + angle * square * _evaluate(sines, square)
    return sine, 1 + square * _evaluate(cosines, square)


def _reduce(x: Array) -> tuple[Array, Array]:
    """x as a number of quarter turns (modulo 4, int32) and the angle that is left, from -pi/4 to pi/4, in float64.

    x 2 / pi modulo 4 is a sum of exact products with pieces of 2 / pi (Payne and Hanek, "Radian reduction for trigonometric
    functions", 1983). Multiples of 2 ** k take pieces of 2 ** k 2 / pi modulo 4.
    """
    wide = x.astype(jnp.float64)
    size = jnp.abs(wide)

    def choose(numbers: Sequence[float]) -> Array:
        chosen = jnp.full_like(wide, numbers[0])
        for number, k in zip(numbers[1:], _RANGES[1:], strict=True):
            chosen = jnp.where(size >= 2.0 ** (k + 23), number, chosen)
        return chosen

    multiple = wide * choose([2.0**-k for k in _RANGES])
    first, second, third, rest = (multiple * choose(pieces) for pieces in zip(*map(_pieces, _RANGES), strict=True))
    turns = [jnp.round(first), jnp.round(second)]
    left = first - turns[0], second - turns[1]
    last = jnp.round(left[0] + left[1] + third)
    part = (((left[0] - last) + left[1]) + third) + rest
    quadrant = sum((turn - 4 * jnp.round(turn * 0.25) for turn in turns), last)
    return quadrant.astype(jnp.int32), part * (math.pi / 2)


@functools.cache
def _pieces(k: int) -> tuple[float, ...]:
    """2 ** k 2 / pi modulo 4 as a sum of numbers of few bits, from the largest on."""
    left, found = _two_over_pi() * 2**k % 4, []
    for piece in range(_PIECES):
        step = Fraction(4, 2 ** (_BITS * (piece + 1)))
        found.append(float(left // step * step))
        left %= step
    return tuple(found)


@functools.cache
def _two_over_pi() -> Fraction:
    """2 / pi with an error below 2 ** -300, by Machin's formula: pi / 4 = 4 atan(1/5) - atan(1/239)."""

    def atan(n: int) -> Fraction:
        return sum((Fraction((-1) ** i, (2 * i + 1) * n ** (2 * i + 1)) for i in range(80)), Fraction(0))

    return Fraction(1, 2) / (4 * atan(5) - atan(239))


def _evaluate(coefficients: Sequence[float], x: Array) -> Array:
    """The polynomial with these coefficients, from the constant one on, by Horner's rule."""
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + jnp.asarray(coefficient, x.dtype)
    return value
