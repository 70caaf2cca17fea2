"""Values at the edges of dtypes and of functions' domains: eager's, to the sign of a zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lists import quick

INF, NAN = math.inf, math.nan
ZEROS = (-0.0, 0.0, -0.25, 0.25, 1.0, 2.0, -1.0, -2.5)
NAMED = (*(NAN, NAN, INF, -INF), *(float(n) for n in range(17)))

Case = tuple[Callable[..., Any], Sequence[Sequence[float]]]
FLOATS: dict[str, Case] = {
    "among NaN": (torch.isin, ((16.0, 1.0, INF, NAN, 3.5), NAMED)),
    "not among NaN": (lambda x, y: torch.isin(x, y, invert=True), ((16.0, 1.0, INF, NAN, 3.5), NAMED)),
    "among NaN without infinity": (torch.isin, ((16.0, INF, -INF), (*NAMED[:2], *NAMED[4:]))),
    "among NaN alone": (torch.isin, ((INF, NAN, 0.0), (NAN,) * 30)),
    "downward from zero": (lambda x: x * torch.arange(0.0, -8.0, -1.0, dtype=x.dtype), (ZEROS,)),
    "downward to zero": (lambda x: x * torch.linspace(0, -1, 8, dtype=x.dtype), (ZEROS,)),
    "whole": (lambda x: (x.trunc(), x.frac()), (ZEROS,)),
    "log of gamma": (torch.lgamma, (ZEROS,)),
    "entropy": (torch.special.entr, (ZEROS,)),
    "NaN becomes -0": (lambda x: x.nan_to_num(-0.0, 1.0, -1.0), ((NAN, INF, -INF, 0.0, -0.0),)),
    "a bound of NaN": (lambda x: (x.clamp(min=NAN), x.clamp(max=NAN), x.clamp(NAN, 1.0)), (NAMED[2:],)),
    "crossed bounds": (lambda x: x.clamp(2.0, 1.0), (NAMED[2:],)),
    "trigamma": (lambda x: torch.polygamma(1, x), ((INF, NAN, 1.0, 1e4, -0.5),)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", quick(FLOATS, "among NaN", "whole"))
def test_floats(name: str, dynamic: bool) -> None:
    function, given = FLOATS[name]

    def run(arguments: list[list[Tensor]]) -> list[Any]:
        return [function(*each) for each in arguments]

    arguments = [
        [torch.tensor(x, dtype=dtype) for x in given] for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    found = torch.compile(run, backend="dynaxla", dynamic=dynamic)(arguments)
    for mine, eager in zip(found, run(arguments), strict=True):
        assert all(map(_equals, _flat(mine), _flat(eager)))


def _flat(results: Any) -> list[Any]:
    return [x for result in (results if isinstance(results, tuple) else (results,)) for x in result.tolist()]


def _equals(mine: Any, eager: Any) -> bool:
    """Whether numbers are equal but for a rounding; zeros of their sign."""
    if math.isnan(eager) or eager == 0 or not math.isfinite(eager):
        return str(mine) == str(eager)
    return math.isclose(mine, eager, rel_tol=1e-2)


@pytest.mark.parametrize("function", [lambda x: torch.polygamma(1, x), lambda x: torch.special.zeta(1.5, x)])
def test_small_values_of_large_numbers(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1e10, 1e18, 1e20, 1e30])
    torch.testing.assert_close(torch.compile(function, backend="dynaxla")(x), function(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_common_divisors_of_the_least_numbers(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    numbers = (limits.min, limits.min + 1, 0, 1, 2, 3, 6, limits.min // 2, limits.max // 2 + 1, limits.max)
    pairs = torch.tensor(list(itertools.product(numbers, numbers)), dtype=dtype).unbind(1)
    assert torch.compile(torch.gcd, backend="dynaxla")(*pairs).tolist() == torch.gcd(*pairs).tolist()
    least = torch.tensor([limits.min] * 4, dtype=dtype)  # others end eager's process
    factors = torch.tensor([limits.min, 0, 6, 2], dtype=dtype)
    assert torch.compile(torch.lcm, backend="dynaxla")(least, factors).tolist() == torch.lcm(least, factors).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        torch.xlogy,
        torch.special.xlog1py,
        lambda x, y: torch.special.entr(y),
        lambda x, y: torch.logit(y % 1),
        lambda x, y: torch.logit(x % 1, 0.1),
        lambda x, y: torch.logit(x, 0.3),
    ],
)
def test_logarithms_of_16_bits_are_rounded(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    x, y = ((torch.rand(500) * 3 + 0.01).to(dtype) for _ in range(2))
    assert torch.equal(torch.compile(function, backend="dynaxla")(x, y), function(x, y))
