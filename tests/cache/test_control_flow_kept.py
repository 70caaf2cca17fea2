"""Loops and branches outlive the process as all else does: what a sub-graph computes is in the key, to the last constant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import map as map_
from torch._higher_order_ops import scan, while_loop
from torch.utils._pytree import tree_leaves

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.cache.store import Store
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.observe.recorder import Recorder
from dynaxla.pipeline import Pipeline
from dynaxla.runtime.executable_cache import ExecutableCache
from tests.tolerances import assert_close

Function = Callable[[Tensor], Any]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of the process that the tests' functions are compiled in."""
    made = Store(tmp_path / "cache")
    own = dataclasses.replace(shared.process(), executables=ExecutableCache(made))
    monkeypatch.setattr(backend, "process", lambda: own)
    return made


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[CallGraph]:
    """What was lowered."""
    found: list[CallGraph] = []
    lower = Pipeline._lower

    def noted(self: Pipeline, calls: CallGraph) -> Any:
        found.append(calls)
        return lower(self, calls)

    monkeypatch.setattr(Pipeline, "_lower", noted)
    return found


def call_anew(function: Function, *given: Tensor, dynamic: bool = False) -> Any:
    """As in a process that finds nothing but what is on disk: the operators made of control flow have other names there."""
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=dynamic)(*given)


def assert_all_close(name: str, found: Any, wanted: Any) -> None:
    for mine, eagers in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        try:
            assert_close(mine, eagers)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def loop(body: Callable[[Tensor], Tensor], turns: int = 3, counted: int = 1) -> Function:
    def run(x: Tensor) -> Any:
        return while_loop(lambda i, x: i < turns, lambda i, x: (i + counted, body(x)), (torch.tensor(0), x))

    return run


def branch(true: Callable[[Tensor], Tensor], false: Callable[[Tensor], Tensor]) -> Function:
    return lambda x: torch.cond(x.sum() > 0, true, false, (x,))


def nested(inner: float) -> Function:
    def run(x: Tensor) -> Tensor:
        twice = lambda x: torch.cond(x.mean() > inner, lambda x: x * 2, lambda x: x - 1, (x,))  # noqa: E731
        return torch.cond(x.sum() > 0, twice, lambda x: x + 1, (x,))

    return run


def cumulated(times: float) -> Function:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        now = carry * times + row
        return now, now.sin()

    return lambda x: scan(step, x[0] * 0, x)


def holding(held: list[float]) -> Function:
    return branch(lambda x: x * torch.tensor(held), lambda x: x - 1)


FUNCTIONS: dict[str, Function] = {
    "sine": loop(lambda x: x.sin()),
    "cosine": loop(lambda x: x.cos()),
    "four turns": loop(lambda x: x.sin(), turns=4),
    "every other turn": loop(lambda x: x.sin(), counted=2),
    "times a number": loop(lambda x: x * 2),
    "times a fraction": loop(lambda x: x * 2.5),
    "plus itself": loop(lambda x: x + x),
    "sine or cosine": branch(lambda x: x.sin(), lambda x: x.cos()),
    "cosine or sine": branch(lambda x: x.cos(), lambda x: x.sin()),
    "copy or sine": branch(lambda x: x.clone(), lambda x: x.sin()),
    "inner at 0": nested(0.0),
    "inner at 9": nested(9.0),
    "sums": cumulated(1.0),
    "decaying sums": cumulated(0.5),
    "each row": lambda x: map_(lambda row: row.softmax(0), x),
    "each row, times 2": lambda x: map_(lambda row: row.softmax(0) * 2, x),
    "holding ones": holding([1.0, 1.0, 1.0]),
    "holding another": holding([1.0, 1.0, 2.0]),
    "holding minus zero": holding([1.0, 1.0, -0.0]),
}


@torch.no_grad()
def test_each_has_a_key_of_its_own_that_the_next_process_knows(
    store: Store, lowered: list[CallGraph], recorder: Recorder
) -> None:
    x = torch.rand(4, 3)
    for name, function in FUNCTIONS.items():
        with recorder.expect(compiles=1, loads=0):
            assert_all_close(name, call_anew(function, x), function(x))
    lowered.clear()
    for name, function in reversed(FUNCTIONS.items()):
        with recorder.expect(compiles=0, loads=1, eager_ops=0):
            assert_all_close(name, call_anew(function, x), function(x))
    assert not lowered


def choose(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.softmax(0), lambda x: x - x.mean(0), (x,))  # type: ignore[no-any-return]


def accumulate(x: Tensor) -> Any:
    return scan(lambda c, y: (c + y, c * y), x[0] * 0, x)


@torch.no_grad()
@pytest.mark.parametrize("function", [loop(lambda x: x.sin() * x.shape[0]), choose, accumulate])
def test_sizes_that_vary(function: Callable[..., Any], store: Store, recorder: Recorder) -> None:
    """A padded form is named by what it computes: a later process finds its program, which serves the whole bucket."""
    x, other = torch.rand(7, 3), torch.rand(5, 3)
    for given, compiles in ((x, 1), (x, 0), (other, 0)):
        with recorder.expect(compiles=compiles, loads=1 - compiles):
            assert_all_close("", call_anew(function, given, dynamic=True), function(given))


@torch.library.custom_op("kept_in_a_loop::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)


@torch.no_grad()
def test_a_users_lowering_in_a_loop_is_in_no_key(store: Store, recorder: Recorder) -> None:
    """No key says what its formula is: what XLA is given does, and that has to be lowered first."""
    x = torch.rand(4, 3)
    for times in (3, 5, 3):
        dynaxla.register_lowering(tripled._opoverload, lambda x, times=times: x * times, replace=True)
        assert_close(call_anew(loop(lambda x: tripled(x)), x)[1], x * times**3)
