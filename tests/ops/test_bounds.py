"""Bounds that are numbers: a zero keeps its sign, and a bound that is NaN makes all NaN, as in eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lists import quick

NUMBERS = (0.0, -0.0, math.nan, math.inf, -math.inf, 0.5, -0.5, 3.0, -3.0, 7.0, -7.0)

BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 2.0),
    "least": lambda x: x.clamp(min=0.0),
    "least, below zero": lambda x: x.clamp(min=-0.0),
    "most": lambda x: x.clamp(max=0.0),
    "most, below zero": lambda x: x.clamp(max=-0.0),
    "both": lambda x: x.clamp(0.0, 0.0),
    "crossed": lambda x: x.clamp(2.0, 1.0),
    "least of NaN": lambda x: x.clamp(min=math.nan),
    "most of NaN": lambda x: x.clamp(max=math.nan),
    "NaN and a number": lambda x: x.clamp(math.nan, 1.0),
    "infinite": lambda x: x.clamp(math.inf),
    "a tensor of NaN": lambda x: x.clamp(torch.tensor(math.nan, dtype=x.dtype), torch.tensor(1.0, dtype=x.dtype)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", quick(BOUNDED, "relu", "least of NaN"))
def test_numbers_of_every_kind(name: str, dynamic: bool) -> None:
    function = BOUNDED[name]
    numbers = [
        torch.tensor(NUMBERS).to(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ]

    def run(numbers: list[Tensor]) -> list[Tensor]:
        return [function(x) for x in numbers]

    found = torch.compile(run, backend="dynaxla", dynamic=dynamic)(numbers)
    for mine, eager in zip(found, run(numbers), strict=True):
        assert str(mine.tolist()) == str(eager.tolist())  # which tells zeros apart, and has NaN equal


@pytest.mark.parametrize("function", [torch.relu, F.relu6, lambda x: x.clamp(-1, 1)])
def test_integers(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-3, 0, 5])
    assert torch.compile(function, backend="dynaxla")(x).tolist() == function(x).tolist()
