"""Quotients are those of IEEE where a last digit decides: XLA's reciprocals and joined divisions are kept away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close

WHOLE = torch.arange(8000, dtype=torch.float64)
"""Multiples of 41, whose reciprocal in float32 is too small, and of 49, for float64, are among them."""

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: torch.floor(x / 41),
    "floor in float64": lambda x: torch.floor(x.double() / 49),
    "ceil": lambda x: torch.ceil(-x / 41),
    "round": lambda x: torch.round(x / 82),
    "trunc": lambda x: torch.trunc(x / 41),
    "to integers": lambda x: (x / 41).long(),
    "comparison": lambda x: x / 41 >= 1,
    "after other arithmetic": lambda x: torch.floor((x / 41 + 2).clamp(max=1e6) * 1.0),
    "of integers": lambda x: (x.long() / 41).floor(),
    "by a tensor": lambda x: torch.floor(x / torch.full((1,), 41.0)),
    "by rows": lambda x: torch.floor(x.view(-1, 8) / x.view(-1, 8)[5:6, 1:2]),
    "of one": lambda x: torch.floor(x[41] / 41),
    "returned": lambda x: x / 41,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_see_the_exact_quotient(name: str) -> None:
    x = WHOLE.float()
    assert torch.equal(torch.compile(STEPS[name], backend="dynaxla")(x), STEPS[name](x))


def test_divisions_in_a_row_do_not_overflow() -> None:
    def divides(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x / y / y, y / (y * 1e5 / y), x / 1e25 / 1e25

    x, y = torch.full((9,), 1e30), torch.full((9,), 1e25)
    for ours, wanted in zip(torch.compile(divides, backend="dynaxla")(x, y), divides(x, y), strict=True):
        assert torch.isfinite(wanted).all()
        assert wanted.all()
        assert_close(ours, wanted)


def test_special_divisors() -> None:
    x = torch.tensor([0.0, -0.0, 1, -1, float("inf"), float("-inf"), float("nan"), 3.0])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        y = x.to(dtype)
        quotients = torch.compile(lambda a, b: a / b, backend="dynaxla")(y[:, None], y)
        torch.testing.assert_close(quotients, y[:, None] / y, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(quotients.signbit() | quotients.isnan(), (y[:, None] / y).signbit() | quotients.isnan())
