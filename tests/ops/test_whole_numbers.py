"""Floats become integers as torch's CPU kernels have them on this processor: NaN and what is out of range, too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lists import quick

aten, prims = torch.ops.aten, torch.ops.prims

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, -0.5, -1.0, 255.9, 263.0, -129.0, 32768.0, -32769.5, 70000.0),
    *(2.0**31 - 0.5, -(2.0**31) - 0.5, 2.0**31 + 255, 3000000123.0, -3000000123.0, 2.0**40 + 77, 1e18 + 1152),
    *(2.0**63 - 1024, 2.0**63, -(2.0**63), -9.3e18, 1e30),
)

CONVERSIONS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "to": lambda x, dtype: x.to(dtype),
    "of a result": lambda x, dtype: (x * 1).to(dtype) + 0,
    "copy": lambda x, dtype: torch.zeros(x.shape, dtype=dtype).copy_(x),
    "row": lambda x, dtype: torch.zeros(2, x.shape[0], dtype=dtype).index_copy_(0, torch.tensor(1), x.to(dtype)[None]),
    "column": lambda x, dtype: torch.zeros(x.shape[0], 2, dtype=dtype).index_fill_(1, torch.tensor(0), 1).t().copy_(x),
    "sum": lambda x, dtype: x[:, None].sum(1, dtype=dtype),
    "product": lambda x, dtype: x[:, None].prod(1, dtype=dtype),
    "cumulative sum": lambda x, dtype: x[:, None].cumsum(1, dtype=dtype),
    "prim": lambda x, dtype: prims.convert_element_type.default(x, dtype),
    "no dims": lambda x, dtype: torch.stack([x[0].to(dtype), x[1].to(dtype)]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", quick(CONVERSIONS, "to", "copy"))
def test_all_pairs(name: str, dynamic: bool) -> None:
    convert = CONVERSIONS[name]
    numbers = [torch.tensor(NUMBERS, dtype=torch.float64).to(dtype) for dtype in FLOATS]

    def run(numbers: list[Tensor]) -> list[Tensor]:
        return [convert(x, dtype) for x in numbers for dtype in INTEGERS]

    found, expected = torch.compile(run, backend="dynaxla", dynamic=dynamic)(numbers), run(numbers)
    pairs = [(x, dtype) for x in FLOATS for dtype in INTEGERS]
    assert not [
        pair for pair, mine, eager in zip(pairs, found, expected, strict=True) if mine.tolist() != eager.tolist()
    ]
