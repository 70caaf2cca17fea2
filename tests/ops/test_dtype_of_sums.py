"""Sums in a 16-bit dtype that the caller names are added in float32, whatever the operand's dtype, as eager adds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close

SUMS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "sum": lambda x, dtype: torch.sum(x, dtype=dtype),
    "sum of rows": lambda x, dtype: torch.sum(x, 1, dtype=dtype),
    "mean": lambda x, dtype: torch.mean(x, dtype=dtype),
    "mean of rows": lambda x, dtype: torch.mean(x, 1, dtype=dtype),
    "nansum": lambda x, dtype: torch.nansum(x, 1, dtype=dtype),
    "cumsum": lambda x, dtype: torch.cumsum(x, 1, dtype=dtype),
    "cumprod": lambda x, dtype: torch.cumprod(x.clamp(1, 2)[:, :10], 1, dtype=dtype),
    "softmax": lambda x, dtype: torch.softmax(x, 1, dtype=dtype),
}
OPERANDS = (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_many(name: str, operand: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (3, 4000)) if operand is torch.bool else torch.randint(-100, 127, (3, 4000))
    x, summed = x.to(operand), SUMS[name]
    result = torch.compile(summed, backend="dynaxla", dynamic=False)(x, dtype)
    assert_close(result, summed(x, dtype))
