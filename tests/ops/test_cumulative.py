"""Cumulative sums, products and extremes on the CPU are eager's to the bit: its order, and the dtype it accumulates in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SHAPES = (((), 0), ((5, 3000), 1), ((1500, 3), 0), ((3, 400, 5), 1), ((0, 3), 0), ((0, 3), 1))
RUNNING: dict[str, Callable[[Tensor, int], Any]] = {
    "sums": torch.cumsum,
    "products": torch.cumprod,
    "largest": torch.cummax,
    "smallest": torch.cummin,
}


def bits(x: Tensor) -> Tensor:
    """Of real floats the bits, NaN all alike, so that zeros of both signs differ; other tensors as they are."""
    if not x.dtype.is_floating_point:
        return torch.view_as_real(x) if x.dtype.is_complex else x
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.where(x.isnan(), torch.nan, x).view(whole)


def assert_same_bits(function: Callable[[Tensor, int], Any], x: Tensor, dim: int) -> None:
    actual = torch.compile(function, backend="dynaxla", dynamic=False)(x, dim)
    expected = function(x, dim)
    for mine, eagers in zip(*(y if isinstance(y, tuple) else (y,) for y in (actual, expected)), strict=True):
        assert (mine.dtype, mine.shape) == (eagers.dtype, eagers.shape)
        assert torch.equal(bits(mine), bits(eagers)), (function, x.dtype, x.shape)


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("dtype", FLOATS + WHOLE, ids=str)
def test_random_rows(name: str, dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        x = torch.randn(shape)
        x = 0.99 + x / 50 if name == "products" and dtype.is_floating_point else x  # no product is subnormal
        x = x.to(dtype) if dtype.is_floating_point else (x * 4).to(torch.int64).to(dtype)
        assert_same_bits(RUNNING[name], x, dim)


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    choices = torch.tensor([-0.0, 0.0, 1.0, -1.0, 2.0, torch.inf, -torch.inf, 3e4, 1e-4], dtype=dtype)
    x = choices[torch.randint(len(choices), (40, 30))]
    x[::2] = choices[torch.randint(4, (20, 30))]
    x[torch.rand(40, 30) < 0.01] = torch.nan
    for dim in (0, 1):
        assert_same_bits(RUNNING[name], x, dim)


def test_a_product_that_leaves_float32_and_returns() -> None:
    assert_same_bits(torch.cumprod, torch.tensor([[1e30, 1e30, 1e-30, 1e-30], [1e-30, 1e-30, 1e30, 1e30]]), 1)


def test_complex_sums() -> None:
    assert_same_bits(torch.cumsum, torch.randn(300, 3, dtype=torch.complex64), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logarithms_of_sums_of_exponentials(dtype: torch.dtype) -> None:
    x = torch.randn(4, 500, dtype=dtype) * 30
    x[1, 3], x[2, :4], x[3, 7] = torch.inf, -torch.inf, torch.nan
    actual = torch.compile(torch.logcumsumexp, backend="dynaxla")(x, 1)
    torch.testing.assert_close(actual, torch.logcumsumexp(x, 1), rtol=2e-7, atol=1e-6, equal_nan=True)
