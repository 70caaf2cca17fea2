"""XLA's algebra of real numbers: what it would compute as one op of other numbers is computed op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rounding by a large number": lambda x: (x + 12582912.0) - 12582912.0,
    "in place": lambda x: x.clone().add_(1e6).sub_(1e6),
    "a number minus a sum": lambda x: 1e4 - (x + 1e4),
    "three sums": lambda x: ((x + 1e4) + 1e4) - 2e4,
    "products that overflow together": lambda x: x * 1e200 * 1e200,
    "factors that overflow together": lambda x: x * 1e20 * 1e20,
    "factors that vanish together": lambda x: x * 1e-25 * 1e-25,
    "an overflow between": lambda x: x * 1e20 * 1e-20,
    "quotients by numbers": lambda x: x / 1e15 * 1e30 / 1e25,
    "quotients of quotients": lambda x: x / (x.abs() + 1e30) / (x.abs() + 1e9),
    "a quotient by a quotient": lambda x: x / (x / (x + 1e25)),
    "the root of a square": lambda x: (x * x).sqrt(),
    "the power of a power": lambda x: (x**2) ** 0.5,
    "the logarithm of an exponential": lambda x: x.exp().log(),
    "the logarithm of a power": lambda x: (x**3).log(),
    "the product of exponentials": lambda x: x.exp() * (2 * x).exp(),
    "the power of an exponential": lambda x: x.exp() ** 0.5,
    "zero added": lambda x: (x + 0.0).signbit(),
    "a sum from zero": lambda x: sum([x, x * 0.0]).signbit(),  # type: ignore[union-attr]
    "zero added, as an angle": lambda x: torch.atan2(x + 0, -torch.ones_like(x)),
    "zeros added": lambda x: (x + torch.zeros_like(x)).signbit(),
    "added to zeros": lambda x: (torch.zeros(2, 1, dtype=x.dtype) + x).signbit(),
    "numbers alone": lambda x: (torch.zeros_like(x) + 0 + 1e6) - 1e6 + x * 0,
    "a size and zeros": lambda x: (torch.zeros_like(x) + x.shape[0] + 1e6) - 1e6 + x * 0,
    "zeros and zeros": lambda x: (torch.zeros_like(x) >= torch.zeros_like(x)) & (x == x),
    "zero taken away": lambda x: torch.add(x, 0, alpha=-1).signbit(),
    "a filled tensor, twice": lambda x: (x + torch.full_like(x, 1e6)) - torch.full((), 1e6, dtype=x.dtype),
    "a magnitude and zeros": lambda x: x.abs() >= torch.zeros_like(x),
    "zeros and a magnitude": lambda x: torch.zeros_like(x) <= x.abs(),
    "the quotient of exponentials": lambda x: x.exp() / (2 * x).exp(),
    "a magnitude": lambda x: x.abs() >= 0,
    "zero at most a magnitude": lambda x: x.abs() >= 0,
    "a square": lambda x: x * x >= 0,
    "an exponential": lambda x: torch.where(x.exp() >= 0, x, 7.0),
    "a rectified number": lambda x: torch.relu(x) >= 0,
    "the larger one": lambda x: torch.maximum(x, torch.zeros_like(x)) >= 0,
}
VALUES = (0.3, 1.7, -0.0, 0.0, 1e-10, 1e20, -1e20, 1e30, 60.0, 1e4, math.inf, -math.inf, math.nan, -2.5)


def compute_all(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(function(x) for function in FUNCTIONS.values())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eagers_numbers(dtype: torch.dtype, dynamic: bool) -> None:
    compiled = torch.compile(compute_all, backend="dynaxla", dynamic=dynamic)
    for count in (5, len(VALUES)) if dynamic else (len(VALUES),):
        x = torch.tensor(VALUES[:count], dtype=dtype)
        for name, made, expected in zip(FUNCTIONS, compiled(x), compute_all(x), strict=True):
            torch.testing.assert_close(
                made, expected, rtol=1e-5, atol=1e-37, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_numbers_beside_whole_numbers_keep_their_fractions() -> None:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return (x / 2.5) * 3.5, (x + 1.5) - 0.5, (x * 0.1) * 0.1, (x + 0.0).signbit(), torch.zeros_like(x) + x / 0.3

    x = torch.arange(-3, 4)
    for made, expected in zip(torch.compile(compute, backend="dynaxla")(x), compute(x), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-7)
