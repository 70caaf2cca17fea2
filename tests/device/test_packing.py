"""Many small weights of the device go to a program as one argument, and every write to one of them is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynaxla.programs.argument_binder import ArgumentBinder
from dynaxla.programs.program import Program

COUNT = 40


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32] * COUNT + [torch.float64] * COUNT + [torch.float16] * 3
        self.small = nn.ParameterList([torch.randn(3, 1 + i % 3).to(dtype) for i, dtype in enumerate(dtypes)])
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.layout = nn.Parameter(torch.randn(4, 3).t())
        self.large = nn.Parameter(torch.randn(3, 2048))
        self.register_buffer("whole", torch.arange(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for i, weight in enumerate(self.small):
            x = x * 0.5 + (weight if i % 20 else weight.sin())[:, :1]
        y = x + self.large[:, :1] + self.layout[:, :1] + self.scalar
        return y, self.small[0], y * self.whole[:, None]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arguments the programs of parts were run with."""
    seen: list[int] = []
    run = ArgumentBinder.run

    def counting(self: ArgumentBinder, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        seen.append(len(self._weight_buffers(self._pick_weights(args))) + len(program.inputs))
        return run(self, program, values, args)

    monkeypatch.setattr(ArgumentBinder, "run", counting)
    return seen


def _both(device: torch.device) -> tuple[Many, Many, Callable[..., tuple[Tensor, ...]]]:
    torch._dynamo.reset()
    theirs = Many()
    mine = Many()
    mine.load_state_dict(theirs.state_dict())
    mine.to(device)
    return theirs, mine, torch.compile(mine, backend="dynaxla")


def _agree(theirs: Many, compiled: Callable[..., tuple[Tensor, ...]], device: torch.device) -> None:
    x = torch.randn(3, 2)
    with torch.no_grad():
        for expected, found in zip(theirs(x), compiled(x.to(device)), strict=True):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_small_weights_are_one_argument_for_each_dtype(device: torch.device, arguments: list[int]) -> None:
    theirs, _, compiled = _both(device)
    _agree(theirs, compiled, device)
    _agree(theirs, compiled, device)
    assert arguments[-1] < 20  # two packs, the few of float16, what is folded, large, handed through, or lies otherwise


def _in_place(weight: nn.Parameter, value: Tensor) -> None:
    weight.copy_(value)


def _by_data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data = value


def _through_data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data.copy_(value)


def _by_set(weight: nn.Parameter, value: Tensor) -> None:
    weight.set_(value)


def _swapped(weight: nn.Parameter, value: Tensor) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(value))


@pytest.mark.parametrize("write", [_in_place, _by_data, _through_data, _by_set, _swapped])
@pytest.mark.parametrize("place", [1, 2, COUNT + 1])
@torch.no_grad()
def test_every_write_is_seen(device: torch.device, write: Callable[[nn.Parameter, Tensor], None], place: int) -> None:
    theirs, mine, compiled = _both(device)
    _agree(theirs, compiled, device)
    for _ in range(2):
        value = torch.randn_like(theirs.small[place])
        theirs.small[place].copy_(value)
        write(mine.small[place], value.to(device))
        _agree(theirs, compiled, device)


@torch.no_grad()
def test_a_weight_that_takes_anothers_place_is_seen(device: torch.device) -> None:
    theirs, mine, compiled = _both(device)
    _agree(theirs, compiled, device)
    for model in (theirs, mine):
        model.small[1].data, model.small[4].data = model.small[4].data, model.small[1].data
    _agree(theirs, compiled, device)


def test_weights_in_training_stay_apart(device: torch.device, arguments: list[int]) -> None:
    _, mine, compiled = _both(device)
    compiled(torch.randn(3, 2, device=device))[0].sum().backward()
    assert max(arguments) > 2 * COUNT
    assert mine.small[1].grad is not None


def test_weights_of_a_part_in_training_stay_apart(device: torch.device, arguments: list[int]) -> None:
    """The graph has an op that runs in eager, so that it is made of parts."""
    _, mine, _ = _both(device)
    compiled = torch.compile(lambda x: torch.poisson(mine(x)[0].abs()) + mine(x)[0], backend="dynaxla")
    compiled(torch.randn(3, 2, device=device)).sum().backward()
    assert max(arguments) > 2 * COUNT


@torch.no_grad()
def test_threads_see_their_writes(device: torch.device) -> None:
    theirs, mine, compiled = _both(device)
    _agree(theirs, compiled, device)
    x = torch.zeros(3, 2, device=device)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            value = torch.randn_like(theirs.small[1])
            theirs.small[1].copy_(value)
            mine.small[1].copy_(value)
            expected = theirs(torch.zeros(3, 2))[0]
            for found in pool.map(lambda _: compiled(x)[0].cpu(), range(8)):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_nothing_is_packed_where_folding_is_off(device: torch.device, arguments: list[int]) -> None:
    _, mine, _ = _both(device)
    torch.compile(mine, backend="dynaxla", options={"fold_parameters": False})(torch.zeros(3, 2, device=device))
    assert arguments[-1] > 2 * COUNT


@torch.no_grad()
def test_vectors_are_packed(device: torch.device, arguments: list[int]) -> None:
    weights = [torch.randn(1 + i % 2 * 3) for i in range(COUNT)]
    mine = nn.ParameterList(weights).to(device)
    compiled = torch.compile(lambda x: sum(mine, x), backend="dynaxla")
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(4, device=device)).cpu(), sum(weights, torch.ones(4)))
        mine[1].add_(1)
        weights[1] = weights[1] + 1
    assert arguments[-1] == 2


@torch.no_grad()
def test_nothing_is_packed_beside_products(device: torch.device, arguments: list[int]) -> None:
    """XLA would compile each loop behind a product apart."""
    mine = nn.Sequential(*(nn.LayerNorm(4) for _ in range(COUNT)), nn.Linear(4, 4)).to(device)
    torch.compile(mine, backend="dynaxla")(torch.ones(2, 4, device=device))
    assert arguments[-1] > COUNT
