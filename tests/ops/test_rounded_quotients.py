"""Quotients that are rounded down or cut off, of 16 bits by a number, too; and sums of terms of several dtypes."""

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


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_terms_of_several_dtypes(name: str) -> None:
    """All steps are in the dtype of the result."""

    def combine(x: Tensor, y: Tensor, z: Tensor) -> Tensor:  # Dynamo makes three ops of torch.addcdiv
        return getattr(torch.ops.aten, name)(x, y, z, value=3.14)  # type: ignore[no-any-return]

    x = torch.randn(5, 5, dtype=torch.float64)
    numbers = 1 + 9 * torch.rand(5, 5, dtype=torch.float64)
    for one in (torch.float16, torch.float32, torch.float64, torch.int64):
        for other in (torch.float16, torch.float32, torch.float64):
            y, z = numbers.to(one), numbers.mT.to(other)
            actual, expected = torch.compile(combine, backend="dynaxla")(x, y, z), combine(x, y, z)
            assert torch.allclose(actual, expected, rtol=1e-14, atol=1e-14)
