"""Orthogonal polynomials with tensor degrees, by recurrences that run to the largest degree."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.ops.dtypes import WIDE_REAL
from dynaxla.ops.promotion import Operand, compute
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Polynomial = Callable[[jax.Array, jax.Array], jax.Array]  # a function of x and the degree (int64, not negative)

_LARGEST_HERMITE = {4: 128, 8: 512}  # bytes of a float -> degree from which torch gives NaN


def _recurrence(degree: jax.Array, first: jax.Array, step: Step, needed: jax.Array) -> jax.Array:
    """The polynomials of these degrees, where `needed`; 1 for degree 0, `first` for degree 1.

    `step(k, q, p)` computes degree k from degrees k - 1 (`q`) and k - 2 (`p`).
    """

    def grows(k: jax.Array, q: jax.Array) -> jax.Array:
        return needed & (k <= degree) & ~jnp.isnan(q)

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        k, _, q = state
        return jnp.any(grows(k, q))

    def raise_degree(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, p, q = state
        chosen = grows(k, q)
        return k + 1, jnp.where(chosen, q, p), jnp.where(chosen, step(k.astype(q.dtype), q, p), q)

    _, _, last = lax.while_loop(goes_on, raise_degree, (jnp.int64(2), jnp.ones_like(first), first))
    return jnp.where(degree == 0, 1, last)


def _chebyshev(
    x: jax.Array, degree: jax.Array, first: jax.Array, ends: tuple[jax.Array, jax.Array], turned: jax.Array, most: int
) -> jax.Array:
    """Chebyshev polynomials.

    Args:
        x: the arguments.
        degree: int64, not negative.
        first: the polynomial of degree 1.
        ends: the values at 1 and at -1; the latter is negated for odd degrees.
        turned: the values between -1 and 1 by trigonometric functions.
        most: the largest degree that is computed by the recurrence between -1 and 1.
    """
    inside, at_end = jnp.abs(x) < 1, jnp.abs(x) == 1
    by_angle = inside & (degree > most)
    stepped = _recurrence(degree, first, lambda k, q, p: (x + x) * q - p, ~(by_angle | at_end))
    signed = jnp.where(degree % 2 == 0, ends[1], -ends[1])
    return jnp.where(at_end, jnp.where(x > 0, ends[0], signed), jnp.where(by_angle, turned, stepped))


def _t(x: jax.Array, degree: jax.Array, most: int = 6) -> jax.Array:
    one = jnp.ones_like(x)
    return _chebyshev(x, degree, x, (one, one), jnp.cos(degree.astype(x.dtype) * jnp.arccos(x)), most)


def _u(x: jax.Array, degree: jax.Array, most: int = 8) -> jax.Array:
    more, angle = (degree + 1).astype(x.dtype), jnp.arccos(x)
    return _chebyshev(x, degree, x + x, (more, more), jnp.sin(more * angle) / jnp.sin(angle), most)


def _v(x: jax.Array, degree: jax.Array, most: int = 8) -> jax.Array:
    one, twice, angle = jnp.ones_like(x), (degree + degree + 1).astype(x.dtype), jnp.arccos(x)
    turned = jnp.cos(twice / 2 * angle) / jnp.cos(angle / 2)
    near_end = jnp.where(degree % 2 == 0, twice, -twice)  # the cosine there is a rounding error
    turned = jnp.where(jnp.sin(angle / 2) == 1, near_end, turned)
    return _chebyshev(x, degree, x + x - 1, (one, twice), turned, most)


def _w(x: jax.Array, degree: jax.Array, most: int = 8) -> jax.Array:
    one, twice, angle = jnp.ones_like(x), (degree + degree + 1).astype(x.dtype), jnp.arccos(x)
    turned = jnp.sin(twice / 2 * angle) / jnp.sin(angle / 2)
    return _chebyshev(x, degree, x + x + 1, (twice, one), turned, most)


def _hermite_h(x: jax.Array, degree: jax.Array) -> jax.Array:
    return _hermite(degree, x + x, lambda k, q, p: (x + x) * q - 2 * (k - 1) * p)


def _hermite_he(x: jax.Array, degree: jax.Array) -> jax.Array:
    return _hermite(degree, x, lambda k, q, p: x * q - (k - 1) * p)


def _hermite(degree: jax.Array, first: jax.Array, step: Step) -> jax.Array:
    too_large = degree > _LARGEST_HERMITE[first.dtype.itemsize]
    return jnp.where(too_large, jnp.nan, _recurrence(degree, first, step, ~too_large))


def _laguerre(x: jax.Array, degree: jax.Array) -> jax.Array:
    def step(k: jax.Array, q: jax.Array, p: jax.Array) -> jax.Array:
        return ((2 * (k - 1) + (1 - x)) * q - (k - 1) * p) / k

    return jnp.where(x == 0, 1, _recurrence(degree, 1 - x, step, x != 0))


def _legendre(x: jax.Array, degree: jax.Array) -> jax.Array:
    def step(k: jax.Array, q: jax.Array, p: jax.Array) -> jax.Array:
        return ((2 * k - 1) * x * q - (k - 1) * p) / k

    at_end = jnp.abs(x) == 1
    end = jnp.where((x > 0) | (degree % 2 == 0), 1, -1)
    return jnp.where(at_end, end, _recurrence(degree, x, step, ~at_end))


def _of_degrees(polynomial: Polynomial) -> Callable[[Operand, Operand], jax.Array]:
    """Makes the body of a polynomial; the degree is truncated to an integer, and negative degrees give zero."""

    def body(x: jax.Array, n: jax.Array) -> jax.Array:
        x, n = jnp.broadcast_arrays(x, n)
        whole = jnp.where(jnp.abs(n) < 2.0**63, n, -1).astype(jnp.int64)
        return jnp.where(whole < 0, 0, polynomial(x, jnp.maximum(whole, 0))).astype(x.dtype)

    return lambda x, n: compute(body, x, n, inexact=True)


def _shifted(polynomial: Callable[..., jax.Array], most: int) -> Polynomial:
    return lambda x, degree: polynomial(x + x - 1, degree, most)


_POLYNOMIALS = (
    (aten.special_chebyshev_polynomial_t, _t),
    (aten.special_chebyshev_polynomial_u, _u),
    (aten.special_chebyshev_polynomial_v, _v),
    (aten.special_chebyshev_polynomial_w, _w),
    (aten.special_shifted_chebyshev_polynomial_t, _shifted(_t, 6)),
    (aten.special_shifted_chebyshev_polynomial_u, _shifted(_u, 6)),
    (aten.special_shifted_chebyshev_polynomial_v, _shifted(_v, 6)),
    (aten.special_shifted_chebyshev_polynomial_w, _shifted(_w, 4)),
    (aten.special_hermite_polynomial_h, _hermite_h),
    (aten.special_hermite_polynomial_he, _hermite_he),
    (aten.special_laguerre_polynomial_l, _laguerre),
    (aten.special_legendre_polynomial_p, _legendre),
)

for _packet, _polynomial in _POLYNOMIALS:
    OPS.op(_packet.default, _packet.x_scalar, _packet.n_scalar, dtypes=WIDE_REAL)(_of_degrees(_polynomial))
