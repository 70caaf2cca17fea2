"""A process that finds programs on disk makes parts of sketches, and reads a graph when a call wants more than is there."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.aot_cache import cached_graph
from dynaxla.cache.store import Store
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.table import OpRegistry, core_table
from dynaxla.runtime.executable_cache import ExecutableCache
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package's own cache, in which nothing is; that of torch's captures lies beside it."""
    folder = tmp_path / "own"
    own = dataclasses.replace(
        shared.process(),
        registered=OpRegistry(core_table()),  # other tests add to the process's own, and what is of users has no sketch
        executables=ExecutableCache(Store(folder)),
        functions=FunctionTable(),
    )
    monkeypatch.setattr(backend, "process", lambda: own)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipes that were read."""
    found: list[Any] = []
    really = cached_graph.deserialize_graph

    def read(content: bytes) -> Any:
        found.append(really(content))
        return found[-1]

    monkeypatch.setattr(cached_graph, "deserialize_graph", read)
    return found


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).eval()


def _compiled(net: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(net, backend="dynaxla", dynamic=True, options=options)


@torch.no_grad()
def test_programs_that_went_are_compiled_again(programs: Path, reads: list[Any], recorder: Recorder) -> None:
    net, x = _net(), torch.randn(5, 8)
    _compiled(net)(x)
    shutil.rmtree(programs)
    with recorder.expect(captures_loaded=1, compiles=1):
        assert_close(_compiled(net)(x), net(x))
    assert len(reads) == 1


@torch.no_grad()
def test_weights_that_were_written_are_seen(reads: list[Any]) -> None:
    """Also through what is folded from them, whose work is a program of its own."""
    net, x = _net(), torch.randn(5, 8)
    for _ in range(2):
        compiled = _compiled(net)
        assert_close(compiled(x), net(x))
        net[0].weight.mul_(-1.5)
        net[3].weight.data.add_(1)
        assert_close(compiled(x), net(x))
    assert reads == []


@pytest.mark.faulty
@torch.no_grad()
def test_a_fault_in_a_sketched_part_leaves_it_to_eager(
    monkeypatch: pytest.MonkeyPatch, reads: list[Any], recorder: Recorder
) -> None:
    net, x = _net(), torch.randn(5, 8)
    _compiled(net)(x)
    compiled = _compiled(net)

    def fail(self: object, *args: object) -> None:
        raise ZeroDivisionError("mine")

    monkeypatch.setattr("dynaxla.runtime.weight_residency.WeightResidency.buffers", fail)
    assert_close(compiled(x), net(x))
    assert len(reads) == 1


def test_a_backward_is_found_for_the_results_that_were_differentiated(
    programs: Path, reads: list[Any], recorder: Recorder
) -> None:
    """The graph of another set of results is made of the recipe."""

    def differentiate(*used: int) -> torch.Tensor:
        torch._dynamo.reset()
        x = torch.tensor([0.0, 1.0], requires_grad=True)
        results = torch.compile(lambda x: (x * 2, x.log(), x.sqrt(), x**0), backend="dynaxla", dynamic=False)(x)
        sum(results[i].sum() for i in used).backward()
        assert x.grad is not None
        return x.grad

    differentiate(0)
    with recorder.expect(captures_loaded=2, compiles=0):
        assert differentiate(0).tolist() == [2, 2]
    assert not reads
    with recorder.expect(captures_loaded=2, compiles=1):
        assert differentiate(1).tolist() == [torch.inf, 1]
    assert [recipe.kind for recipe in reads] == ["backward"]
    with recorder.expect(captures_loaded=2, compiles=0):
        assert differentiate(1).tolist() == [torch.inf, 1]
    assert differentiate(3).tolist() == [0, 0]  # the recipe says which nodes are sums of gradients
