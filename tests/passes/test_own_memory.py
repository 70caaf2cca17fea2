"""Results have memory of their own unless eager's share it, and eager's strides where these leave gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.same_layout import assert_same_layout
from tests.tolerances import assert_close

Function = Callable[..., tuple[torch.Tensor, ...]]


def _gapped(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(x.shape, (2 * x.shape[1], 1), device=x.device)
    made[:] = x + x
    return made


def _scattered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of which no result shares memory with another, and the last is the input's."""
    none = x[:0]
    return torch.slice_scatter(x, none, 0, 0, 0), torch.slice_scatter(x, none, 0, 0, 0), torch.cat([x, none]), x.t()


def _family(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = _gapped(x)
    return made, made.t(), made[1:], made * 1


def _views_of_one(made: torch.Tensor) -> tuple[torch.Tensor, ...]:
    view = made.reshape(made.shape[0], -1)
    return view, view.narrow(0, 0, view.shape[0])


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0].t()


OWN: dict[str, Function] = {
    "cat with none": lambda x: (torch.cat([x, x.new_ones(0, x.shape[1])]),),
    "cat with none of itself": lambda x: (torch.cat([x, x[:0]]),),
    "slice_scatter of none": lambda x: (torch.slice_scatter(x, x[:0], 0, 0, 0),),
    "several": _scattered,
    "computed, twice": lambda x: (torch.cat([x + 1, x[:0]]), x + 1, torch.cat([x[:0], x + 1])),
}
SHARED: dict[str, Function] = {
    "all of an input by split": lambda x: (x.split(100)[-1], x * 2),
    "pieces of an input": lambda x: (*x.split(2), x + 1),
    "a row of an input by unbind": lambda x: (x.unbind(0)[1], x * 2),
    "chunks and views of an input": lambda x: (*x.chunk(2, 1), x[1:], x.t() * 2),
    "windows of an input": lambda x: (x.unfold(0, 2, 2), x * 2),
    "pieces of a result": lambda x: (x + x).split(2),
    "a user's view of an input": lambda x: (_Transposed.apply(x), x * 2),
    "an input's real view": lambda x: (x.detach(), x * 2),
    "a result twice": lambda x: ((made := x + 1), x * 2, made.contiguous(), made),
    "a result twice, transposed": lambda x: ((made := (x + 1).t()), made.contiguous(), made.t(), made.t().contiguous()),
    "views of one, by a size": lambda x: _views_of_one(x < 0),
    "views of one, whole": lambda x: ((made := x + x).view(x.shape[0], -1), made.narrow(0, 0, x.shape[0])),
}
STRIDES: dict[str, Function] = {
    "memory with gaps": lambda x: (_gapped(x),),
    "a family with gaps": _family,
    "every second": lambda x: ((x + x)[:, ::2], (x * 3)[::2]),
    "all but one": lambda x: ((x + x)[:, 1:], (x + x)[1:]),
    "repeated": lambda x: ((x + x)[:, None].expand(-1, 3, -1),),
    "windows": lambda x: ((x + x).unfold(0, 3, 1),),
    "transposed with gaps": lambda x: ((x + x).t()[1:],),
}


def _check(function: Function, compiled: Callable[..., Any], rows: int, trains: bool = False) -> None:
    x = torch.randn(rows, 6).requires_grad_(trains)
    mine = x.detach().clone().requires_grad_(trains)
    expected, actual = function(x), compiled(mine)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.detach(), other.detach())
    assert_same_layout(actual, expected, [mine], [x])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [*OWN, *SHARED, *STRIDES])
def test_results_lie_as_eagers(name: str, dynamic: bool, trains: bool) -> None:
    function = {**OWN, **SHARED, **STRIDES}[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for rows in (5, 8, 9) if dynamic else (5,):
        _check(function, compiled, rows, trains)


@pytest.mark.parametrize("name", [*OWN, *SHARED, *STRIDES])
@pytest.mark.parametrize("options", [{"executor": "eager"}, {"bucketing": "off"}], ids=str)
def test_results_lie_as_eagers_where_nothing_is_padded(name: str, options: dict[str, Any]) -> None:
    function = {**OWN, **SHARED, **STRIDES}[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=True, options=options)
    _check(function, compiled, 5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_beside_an_eager_op(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inverse = torch.linalg.pinv(x)
        return inverse, torch.cat([x, x[:0]]), torch.cat([inverse, inverse[:0]]), (x + x)[:, ::2]

    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for rows in (5, 7) if dynamic else (5,):
        _check(function, compiled, rows)
