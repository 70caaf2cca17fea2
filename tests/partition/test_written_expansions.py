"""Writes to tensors whose elements share memory, and to parts of these: what eager does, also with numbers that round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dynaxla.observe.recorder import Recorder
from tests.lists import quick

Function = Callable[[torch.Tensor], Any]

REPEATED: dict[str, Function] = {
    "rows": lambda x: x[:1].expand(3, 3),
    "columns": lambda x: x[:, :1].expand(3, 3),
    "a row": lambda x: x.expand(3, 3, 3)[1],
    "a column": lambda x: x[:, :1].expand(3, 3)[:, 1],
    "a row that is broadcast": lambda x: torch.broadcast_to(x[0], (3, 3)),
    "windows": lambda x: x.unfold(1, 2, 1),
}

ONCE: dict[str, Function] = {
    "a batch of one": lambda x: x.expand(1, 3, 3),
    "the same sizes": lambda x: x.expand(-1, -1),
    "a broadcast batch of one": lambda x: torch.broadcast_to(x, (1, 1, 3, 3)),
    "as another": lambda x: x.expand_as(torch.ones(1, 3, 3))[0],
}

WRITES: dict[str, Function] = {
    "zeros": lambda y: y.zero_(),
    "a number": lambda y: y.fill_(1.0),
    "a first column": lambda y: y[..., 0].fill_(2.0),
    "where a mask is": lambda y: y.masked_fill_(y > 0, 7.0),
    "a sum": lambda y: y.add_(1),
    "an assignment": lambda y: y.__setitem__((..., 0), 3.0),
    "a list": lambda y: torch._foreach_zero_([y]),
    "an activation": lambda y: torch.nn.functional.relu(y, inplace=True),
}


def observe(call: Function, x: torch.Tensor) -> object:
    try:
        return [result.tolist() for result in call(x)]
    except RuntimeError:
        return "raises"


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("dynamic", quick([False, True], False))
@pytest.mark.parametrize("factor", [-1e8, math.inf])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", REPEATED | ONCE)
@pytest.mark.parametrize("source", [lambda x: x * 1, lambda x: x])
def test_a_write_to_an_expansion(source: Function, view: str, write: str, factor: float, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = source(x)
        y = (REPEATED | ONCE)[view](x)
        WRITES[write](y)
        return x + 0, y + 0

    x = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0], [7.0, 8.0, -9.0]]) * factor
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    assert observe(compiled, x.clone()) == observe(function, x.clone())


@pytest.mark.parametrize("view", ONCE)
def test_what_repeats_nothing_is_compiled(view: str, recorder: Recorder) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = ONCE[view](x * 2)
        y[..., 0] = 3.0
        return y + 1

    with recorder.expect(graphs=1, compiles=1, eager_ops=0):
        x = torch.randn(3, 3)
        assert torch.equal(torch.compile(function, backend="dynaxla")(x), function(x))


def test_an_expansion_that_is_only_read_is_compiled(recorder: Recorder) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x[:1].expand(3, 3)
        z = torch.nn.functional.dropout(y, 0.0, True).sum(0, True)
        z.mul_(2)
        return checkpoint(torch.neg, y, use_reentrant=False) + z  # type: ignore[no-any-return]

    with recorder.expect(graphs=1, eager_ops=0):
        x = torch.ones(3, 3)
        assert torch.equal(torch.compile(function, backend="dynaxla")(x), function(x))


@pytest.mark.parametrize("make", [lambda: torch.ones(1, 6).expand(3, 6), lambda: torch.ones(7).unfold(0, 3, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_that_is_expanded_later(make: Callable[[], torch.Tensor], dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.fill_(3)
        return x + 1

    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for x in (torch.ones(4, 5), make(), torch.ones(3, 6)):
        assert (compiled(x) == 4).all()
        assert (x == 3).all()
