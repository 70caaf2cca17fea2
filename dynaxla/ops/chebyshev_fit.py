"""Polynomials that stand for functions which XLA does not compute well."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


class ChebyshevFit:
    """The polynomial that is exact at Chebyshev's points of an interval; called with places of it, in any float dtype.

    It is made at the first call, of places mapped to -1 to 1, where its coefficients stay small.

    Args:
        function: of a Python float.
        degree: of the polynomial.
        domain: the interval's ends.
    """

    def __init__(self, function: Callable[[float], float], degree: int, domain: tuple[float, float]) -> None:
        self._function, self._degree, self._domain = function, degree, domain

    def __call__(self, x: jax.Array) -> jax.Array:
        low, high = self._domain
        scale = 2 / (high - low)
        return jnp.polyval(jnp.array(self._coefficients, x.dtype), x * scale - (low + high) * scale / 2)

    @cached_property
    def _coefficients(self) -> list[float]:
        """From the last term to the first."""
        fit = np.polynomial.Chebyshev.interpolate(np.vectorize(self._function), self._degree, domain=self._domain)
        coefficients: list[float] = np.polynomial.chebyshev.cheb2poly(fit.coef)[::-1].tolist()
        return coefficients
