"""Sorts, largest elements, medians and k-th values of rows with equal elements, zeros of both signs, NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Ordering = Callable[[torch.Tensor], Any]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
SORTS: dict[str, Ordering] = {
    "sort": lambda x: x.sort(dim=-1, stable=True),
    "sort descending": lambda x: x.sort(dim=-1, descending=True, stable=True),
    "sort columns": lambda x: x.sort(dim=0, stable=True),
    "sort columns descending": lambda x: torch.sort(x, dim=0, descending=True, stable=True),
}
CHOICES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "largest": lambda x: x.topk(5),
    "smallest": lambda x: x.topk(5, largest=False),
    "most of the largest": lambda x: x.topk(x.shape[-1] - 3),
    "all of the smallest": lambda x: x.topk(x.shape[-1], largest=False),
    "k-th": lambda x: x.kthvalue(7, keepdim=True),
    "last": lambda x: x.kthvalue(x.shape[-1], keepdim=True),
    "median": lambda x: x.median(-1, keepdim=True),
    "median of numbers": lambda x: x.nanmedian(-1, keepdim=True),
}


def rows(dtype: torch.dtype) -> torch.Tensor:
    """[6, 40]: of few values, so that many are equal, and of all that a dtype has beside finite numbers."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x = torch.randint(max(info.min, -9), 9, (6, 40)).to(dtype)
        x[1, ::5], x[2, ::7] = info.max, info.min
        return x
    x = (torch.randn(6, 40) * 4).round().to(dtype)
    x[1, ::5], x[1, 2::9] = torch.nan, -torch.inf
    x[2] = torch.where(torch.arange(40) % 3 == 0, -0.0, 0.0)
    x[3, ::4], x[3, 1::4] = torch.inf, -torch.tensor(torch.nan)
    x[4], x[5] = torch.nan, torch.randn(40) * torch.finfo(dtype).tiny / 8
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_stable_sorts_are_eagers(dtype: torch.dtype) -> None:
    x = rows(dtype)
    for name, function in SORTS.items():
        actual, expected = torch.compile(function, backend="dynaxla")(x), function(x)
        assert torch.equal(actual[1], expected[1]), name
        assert torch.equal(bits(actual[0]), bits(expected[0])), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_what_is_chosen_is_eagers_and_lies_where_the_index_says(dtype: torch.dtype) -> None:
    x = rows(dtype)
    for name, function in CHOICES.items():
        (values, places), expected = torch.compile(function, backend="dynaxla")(x), function(x)[0]
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True, msg=name)
        assert torch.equal(bits(x.gather(-1, places)), bits(values)), name
        assert all(len(row.unique()) == len(row) for row in places), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_medians_of_columns_and_of_all_are_eagers(dtype: torch.dtype) -> None:
    def medians(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.median(0)[0], x.nanmedian(0)[0], x.kthvalue(3, 0)[0], x[:3].median(), x.nanmedian()

    x = rows(dtype)
    torch.testing.assert_close(torch.compile(medians, backend="dynaxla")(x), medians(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_places_of_extremes_are_the_first(dtype: torch.dtype) -> None:
    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(), x.argmin(), x.argmax(0), x.argmin(1, keepdim=True), *x.max(1), *x.min(0)

    x = rows(dtype)[:5]  # the last are subnormal: zeros, and so equal
    torch.testing.assert_close(torch.compile(places, backend="dynaxla")(x), places(x), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_large_whole_numbers_keep_their_order() -> None:
    x = torch.tensor([2**24 + 1, 2**24, -(2**31), 2**31 - 1, -1, 0, 2**30 + 1, 2**30] * 4, dtype=torch.int32)
    for name, function in {**SORTS, **CHOICES}.items():
        assert torch.equal(torch.compile(function, backend="dynaxla")(x)[0], function(x)[0]), name


def test_gradients_of_sorts_and_largest_are_eagers() -> None:
    x = torch.randn(6, 40, requires_grad=True)
    for name, function in {**SORTS, **CHOICES}.items():
        ours, eagers = (
            torch.autograd.grad((run(x)[0] ** 2).sum(), x)
            for run in (torch.compile(function, backend="dynaxla"), function)
        )
        assert torch.equal(ours[0], eagers[0]), name


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, by which zeros differ in their sign. All NaN have the same."""
    x = torch.where(x.isnan(), torch.nan, x) if x.dtype.is_floating_point else x
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
