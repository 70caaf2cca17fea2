"""Several threads capture, compile, run and train at once, on the host and on the device: what one does disturbs no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import nn

import dynaxla
from tests.tolerances import assert_close


@dataclass
class Turns:
    """Threads that do each its own thing again and again, until the last has done it often enough or one failed.

    Attributes:
        failures: what was raised.
        done: of each kind how often.
    """

    turns: int
    failures: list[Exception] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def run(self, *kinds: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]
        self.done = {kind.__name__: 0 for kind in kinds}
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, kind: Callable[[int], None]) -> None:
        for turn in count():
            if self.failures or min(self.done.values()) >= self.turns:
                return
            try:
                kind(turn)
            except Exception as error:
                self.failures.append(error)
                return
            self.done[kind.__name__] = turn + 1


net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
compiled = torch.compile(net, backend="dynaxla")


def infers(turn: int) -> None:
    with torch.no_grad():
        x = torch.randn(turn % 30 + 2, 6)
        assert_close(compiled(x), net(x))


def captures(turn: int) -> None:
    x = torch.randn(turn % 7 + 2)
    assert_close(torch.compile(lambda x: x.sin() + turn, backend="dynaxla")(x), x.sin() + turn)


def trains(turn: int) -> None:
    x, weight = torch.randn(turn % 5 + 2, 4), torch.randn(5, 4)
    ways = (
        (lambda x, y: (x @ y.t()).square().sum()),
        torch.compile(lambda x, y: (x @ y.t()).square().sum(), backend="dynaxla"),
    )
    expected, found = (weight.clone().requires_grad_() for _ in range(2))
    ways[0](x, expected).backward()
    ways[1](x, found).backward()
    assert_close(found.grad, expected.grad)


def runs_on_the_device(turn: int) -> None:
    x = torch.randn(turn % 9 + 1, 5)
    expected, found = x.clone().requires_grad_(), x.to("dynaxla").requires_grad_()
    (expected.tanh() @ expected.t()).sum().backward()
    (found.tanh() @ found.t()).sum().backward()
    assert found.grad is not None
    assert_close(found.grad.cpu(), expected.grad)


def branches(turn: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + turn, lambda x: x * turn, (x,))

    x = torch.randn(5)
    assert_close(torch.compile(function, backend="dynaxla")(x), function(x))


def fails(turn: int) -> None:
    try:
        torch.ones(2, 3, device="dynaxla") @ torch.ones(2, 3, device="dynaxla")
    except RuntimeError as error:
        assert "cannot be multiplied" in str(error)  # noqa: PT017 - nothing else raises it


def test_threads_do_not_disturb_each_other() -> None:
    dynaxla.use("cpu")
    turns = Turns(turns=12)
    turns.run(infers, captures, trains, runs_on_the_device, branches, fails)
    assert not turns.failures
