"""Quotients that are rounded down or cut off: those of 16 bits by a number are exact until they are rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lists import quick


def _spread(x: Tensor, divisor: float) -> Tensor:
    return torch.full(x.shape, divisor, dtype=x.dtype if x.is_floating_point() else None)


QUOTIENTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "by a number": lambda x, divisor: x // divisor,
    "of a number": lambda x, divisor: divisor // (x + 1),
    "cut off": lambda x, divisor: torch.div(x, divisor, rounding_mode="trunc"),
    "rounded down": lambda x, divisor: torch.div(x, divisor, rounding_mode="floor"),
    "by a tensor of no dims": lambda x, divisor: x // torch.tensor(divisor),
    "by a float64": lambda x, divisor: torch.floor_divide(x, torch.tensor(divisor, dtype=torch.float64)),
    "cut off, by a tensor of no dims": lambda x, divisor: torch.div(x, torch.tensor(divisor), rounding_mode="trunc"),
    "by a tensor": lambda x, divisor: x // _spread(x, divisor),
    "cut off, by a tensor": lambda x, divisor: torch.div(x, _spread(x, divisor), rounding_mode="trunc"),
    "the rest": lambda x, divisor: x % divisor,
}


@pytest.mark.parametrize("dtype", quick([torch.float16, torch.bfloat16, torch.float32, torch.int32], torch.float16))
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_at_the_border_of_whole_numbers(name: str, dtype: torch.dtype) -> None:
    quotient = QUOTIENTS[name]
    x = torch.tensor([0.1, 1 / 3, 0, 1, 2, -0.7, 3.3, 5.5] * 5).to(dtype)
    for divisor in (0.1, 0.3, 1 / 3, 0.7):
        expected = quotient(x, divisor)
        actual = torch.compile(quotient, backend="dynaxla", dynamic=False)(x, divisor)
        assert actual.dtype is expected.dtype
        assert torch.allclose(actual, expected, rtol=0, atol=0.01)
