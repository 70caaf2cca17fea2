"""Tensors of two dtypes are compared in the dtype that torch promotes them to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lists import quick

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
# Neighbours in some dtypes, equal in others.
NUMBERS = (0, 1, -1, 127, 128, 255, 256, 257, -128, -129, 32767, 32768, 65535, 2**24, 2**24 + 1, 2**31 - 1, 2**40 + 1)
FRACTIONS = (0.5, 0.1, 1.001, 1.0009765625, 3.14159, 10000.3, 60000.0)

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _numbers(dtype: torch.dtype) -> Tensor:
    numbers = torch.tensor((*NUMBERS, *FRACTIONS), dtype=torch.float64)
    if dtype is torch.bool or dtype.is_floating_point:
        return numbers.to(dtype)
    limits = torch.iinfo(dtype)
    return numbers.clamp(max(limits.min, -(2**53)), min(limits.max, 2**53)).to(dtype)


@pytest.mark.parametrize("name", quick(COMPARISONS, "eq", "lt"))
def test_all_pairs(name: str) -> None:
    compare = COMPARISONS[name]
    pairs = [(_numbers(a)[:, None], _numbers(b)) for a, b in itertools.product(DTYPES, DTYPES)]

    def run(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [compare(a, b) for a, b in pairs]

    found = torch.compile(run, backend="dynaxla")(pairs)
    wrong = [(a.dtype, b.dtype) for (a, b), mine in zip(pairs, found, strict=True) if not mine.equal(compare(a, b))]
    assert not wrong


@pytest.mark.parametrize("name", quick(COMPARISONS, "eq", "lt"))
def test_a_tensor_of_no_dims(name: str) -> None:
    """It takes the dtype of what it is compared with, if both are of one kind: 0.1 in float64 is 0.1 in float32."""
    compare = COMPARISONS[name]
    numbers = torch.tensor((1, 257, 2**24 + 1, 2**40 + 1, 0.1, 10000.3), dtype=torch.float64)
    wholes = numbers.to(torch.int64)
    pairs = [
        (_numbers(a), (numbers if b.is_floating_point else wholes).to(b)) for a, b in itertools.product(DTYPES, DTYPES)
    ]

    def run(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [compare(*pair) for a, b in pairs for one in b for pair in ((a, one), (one, a))]

    found = torch.compile(run, backend="dynaxla")(pairs)
    expected = run(pairs)
    wrong = [i for i, (mine, eager) in enumerate(zip(found, expected, strict=True)) if not mine.equal(eager)]
    assert not wrong
