"""Powers with a number as exponent, at infinities, NaN and zeros of both signs, in every float dtype."""

from __future__ import annotations

import pytest
import torch

from tests.lists import quick
from tests.tolerances import assert_close

BASES = [-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 4.0, -4.0, 3e-5, 6e4, -6e4]
EXPONENTS = [0.5, -0.5, -1, -2, 2, 3, 0, 1, 0.25, 1.5, -3, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", quick(EXPONENTS, 0.5))
def test_a_power_of_special_numbers(exponent: float, dtype: torch.dtype) -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        return x**exponent

    x = torch.tensor(BASES, dtype=dtype)
    actual, expected = torch.compile(power, backend="dynaxla")(x), power(x)
    assert_close(actual, expected)
    known = ~expected.isnan()
    assert torch.equal(actual.signbit()[known], expected.signbit()[known])
