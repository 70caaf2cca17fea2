"""Functions outlive their process too: who compiles them for another processor or in another program lowers nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.cache.store import Store
from dynaxla.lowering import graph_lowering
from dynaxla.lowering.function_cache import KIND
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.torch_mlir_lowering import TorchMlirLowering
from dynaxla.runtime.executable_cache import ExecutableCache
from tests.cache.test_executables import compile_anew, mlp
from tests.tolerances import assert_close


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls torch-mlir and bodies lower."""
    made: Counter[str] = Counter()
    by_torch_mlir, by_bodies = TorchMlirLowering.lower, graph_lowering.lower_bodies

    def offer(self: TorchMlirLowering, calls: Any, finisher: Any) -> Iterator[Any]:
        made["torch-mlir"] += len(calls)
        return by_torch_mlir(self, calls, finisher)

    def lower_bodies(calls: Any, finisher: Any) -> Any:
        made["body"] += len(calls)
        return by_bodies(calls, finisher)

    monkeypatch.setattr(TorchMlirLowering, "lower", offer)
    monkeypatch.setattr(graph_lowering, "lower_bodies", lower_bodies)
    return made


@pytest.fixture
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Store]:
    """What the next process finds where no executable is of use to it."""

    def begin() -> Store:
        store = Store(tmp_path / "cache")
        for path in (tmp_path / "cache").glob("entries/*.executable"):
            path.unlink()
        own = dataclasses.replace(shared.process(), executables=ExecutableCache(store), functions=FunctionTable())
        monkeypatch.setattr(backend, "process", lambda: own)
        return store

    return begin


@torch.no_grad()
def test_what_was_lowered_is_not_lowered_again(new_process: Callable[[], Store], lowered: Counter[str]) -> None:
    model, x = mlp(), torch.randn(5, 8)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = model(x)
        return (
            y,
            y / y.sum(),
            y.sort().indices,
            y.bfloat16() * 2,
        )  # quotients, several results, by torch-mlir and by bodies

    for number in range(2):
        store = new_process()
        for mine, eager in zip(compile_anew(f)(x), f(x), strict=True):
            assert_close(mine, eager)
        assert bool(+lowered) == (number == 0)
        if number == 0:
            assert min(lowered["torch-mlir"], lowered["body"]) > 0
            lowered.clear()
    assert store.counters().hits > 0


@torch.no_grad()
def test_another_precision_is_another_function(new_process: Callable[[], Store], lowered: Counter[str]) -> None:
    new_process()
    model, x = mlp(), torch.randn(5, 8)
    compile_anew(model)(x)
    first = sum(lowered.values())
    new_process()
    compile_anew(model, matmul_precision="default")(x)
    assert sum(lowered.values()) == 2 * first


@torch.no_grad()
def test_nothing_is_kept_without_a_cache(
    new_process: Callable[[], Store], lowered: Counter[str], tmp_path: Path
) -> None:
    new_process()
    compile_anew(mlp(), cache=False)(torch.randn(5, 8))
    assert not list(tmp_path.glob("cache/entries/*"))


@torch.no_grad()
def test_a_body_of_the_users_is_lowered_by_every_process(
    new_process: Callable[[], Store], lowered: Counter[str], tmp_path: Path
) -> None:
    with torch.library._scoped_library("kept_functions", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * 3, "CPU")
        library.impl("scaled", torch.empty_like, "Meta")
        target = torch.ops.kept_functions.scaled.default
        for factor in (3.0, 5.0):
            dynaxla.register_lowering(target, lambda x, factor=factor: jax.numpy.multiply(x, factor), replace=True)
            new_process()
            assert_close(compile_anew(lambda x: target(x))(torch.ones(3)), torch.full((3,), factor))
        assert lowered["body"] == 2
        assert not list(tmp_path.glob(f"cache/entries/*.{KIND}"))


@torch.no_grad()
def test_a_damaged_function_is_lowered_again(
    new_process: Callable[[], Store], lowered: Counter[str], tmp_path: Path
) -> None:
    model, x = mlp(), torch.randn(5, 8)
    new_process()
    compile_anew(model)(x)
    lowered.clear()
    for path in (tmp_path / "cache").glob(f"entries/*.{KIND}"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    store = new_process()
    assert_close(compile_anew(model)(x), model(x))
    assert sum(lowered.values()) == store.counters().corrupt > 0
