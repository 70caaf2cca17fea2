"""What torch-mlir dies of is narrowed to the op, remembered, shown by a script, and compiled by other means or run in eager."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla import runtime_state as shared
from dynaxla.backend import GraphCompiler
from dynaxla.errors import CompileError
from dynaxla.isolation.failures import CompilerFailure, KnownFailures
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits, Options
from dynaxla.runtime.pjrt_clients import CpuClient
from dynaxla.runtime_state import RuntimeState
from tests.lists import quick
from tests.tolerances import assert_close
from tests.zoo.registry import find

aten = torch.ops.aten
ASINH = frozenset({aten.asinh.default})


class DiesOfAsinh(LoweringWorker):
    """Its child aborts, as torch-mlir does, on every module that holds an asinh."""

    def __init__(self) -> None:
        super().__init__(inject_faults=True)
        self.deaths = 0

    def lower(self, module: bytes, version: str, limits: Limits) -> bytes:
        if b"aten.asinh" not in module:
            return super().lower(module, version, limits)
        self.deaths += 1
        return super().lower(module, "fault:abort", limits)


class CountingDeaths(DiesOfAsinh):
    """It counts what it is asked to lower, too."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def lower(self, module: bytes, version: str, limits: Limits) -> bytes:
        self.asked += 1
        return super().lower(module, version, limits)


def new_process(path: Path | None, without_bodies: frozenset[Any], worker: LoweringWorker) -> RuntimeState:
    """What a process with that file of failures would share."""
    choice = LoweringChoice(KnownFailures(path), without_bodies)
    return dataclasses.replace(shared.process(), choice=choice, worker=worker, functions=FunctionTable())


def compile_in(process: RuntimeState, model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(
        model, backend=lambda module, inputs: GraphCompiler(process, Options()).compile(module, inputs)
    )


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.asinh(x * 2).exp() + 1


@torch.no_grad()
def test_a_rule_takes_the_op_that_kills_torch_mlir(tmp_path: Path, recorder: Recorder) -> None:
    x, path, worker = torch.randn(7), tmp_path / "failures.jsonl", DiesOfAsinh()
    with recorder.expect(compiles=1, lowering_failures=1, eager_ops=0):
        assert_close(compile_in(new_process(path, frozenset(), worker), model)(x), model(x))
    assert worker.deaths == 2  # the calls together, and the op alone
    (line,) = path.read_text().splitlines()
    told = json.loads(line)
    assert (told["op"], told["error_id"]) == ("aten.asinh.default", "DX302")

    with recorder.expect(compiles=1, lowering_failures=0, eager_ops=0):
        assert_close(compile_in(new_process(path, frozenset(), worker), model)(x), model(x))
    assert worker.deaths == 2  # the next process knows


@torch.no_grad()
def test_a_graph_of_many_ops_is_halved(tmp_path: Path, recorder: Recorder) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for i in range(150):
            x = x.exp().asinh() * i if i == 90 else (x + i).tanh() * (i + 0.5)
        return x

    x, worker = torch.randn(7), CountingDeaths()
    with recorder.expect(compiles=1, lowering_failures=1, eager_ops=0):
        assert_close(compile_in(new_process(tmp_path / "failures.jsonl", frozenset(), worker), chain)(x), chain(x))
    # The 302 distinct calls, and both halves at every turn, down to eight that are tried one by one.
    assert worker.deaths <= 8
    assert worker.asked <= 1 + 2 * 6 + 8


@torch.no_grad()
def test_without_a_rule_the_op_runs_in_eager(tmp_path: Path, recorder: Recorder) -> None:
    x, path, worker = torch.randn(7), tmp_path / "failures.jsonl", DiesOfAsinh()
    for deaths in (2, 2):
        with recorder.expect(compiles=2, eager_ops=1):
            assert_close(compile_in(new_process(path, ASINH, worker), model)(x), model(x))
        assert worker.deaths == deaths
        reason = recorder.snapshot().fallbacks[-1]
        assert "aten.asinh.default" in reason
        assert "lowering_crashed" in reason
        assert "return torch.asinh(x * 2).exp() + 1" in reason


@torch.no_grad()
def test_the_repro_script_runs(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    compile_in(new_process(path, ASINH, DiesOfAsinh()), model)(torch.randn(7))
    script = json.loads(path.read_text())["repro"]
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "exit status 0" in done.stdout  # torch-mlir itself has nothing against an asinh
    assert "died with exit status" in Path(script).read_text()


def test_a_damaged_file_costs_only_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    KnownFailures(path).add("a call", CompilerFailure("aten.asinh.default", "DX302", "died"), on_disk=True)
    path.write_bytes(b'\xff\xfe{"key": \n[]\n{"key": "x", "unknown": 1}\n' + path.read_bytes() + b'{"key": "tru')
    found = KnownFailures(path)
    assert found.get("a call") == CompilerFailure("aten.asinh.default", "DX302", "died")
    assert found.get("another call") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failures = KnownFailures(tmp_path / "file" / "failures.jsonl")
    failures.add("a call", CompilerFailure("aten.asinh.default", "DX302", "died"), on_disk=True)
    assert failures.get("a call") is not None


@pytest.mark.long
@pytest.mark.parametrize("with_rules", quick([True, False], False))
def test_the_training_forward_of_efficientnet(with_rules: bool, recorder: Recorder) -> None:
    """torch-mlir turns its last pooling into a window larger than the image, which is no program."""
    net, args, kwargs = find("efficientnet").build(torch.float32)
    twin, _, _ = find("efficientnet").build(torch.float32)
    for module in (*net.modules(), *twin.modules()):
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.1  # a cumulative average counts in Python
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = twin.train()(*args, **kwargs).logits
    without = frozenset() if with_rules else frozenset({aten.avg_pool2d.default})
    process = new_process(None, without, LoweringWorker())
    with recorder.expect(compiles=1 if with_rules else 2, eager_ops=0 if with_rules else 1):
        result = compile_in(process, net.train())(*args, **kwargs).logits
    assert_close(result, expected)
    for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        assert_close(ours, theirs)


@torch.no_grad()
def test_a_compiler_that_always_fails_leaves_eager(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = torch.asinh(x) + 1
        return x

    def fail(client: CpuClient, module: bytes, limits: Any, partitions: int = 1) -> Any:
        raise CompileError("no compiler works here")

    monkeypatch.setattr(CpuClient, "compile", fail)
    compiled = torch.compile(model, backend="dynaxla")
    x = torch.randn(5)
    with recorder.expect(graphs=1, compiles=0):
        for _ in range(2):
            assert_close(compiled(x), model(x))


@torch.no_grad()
def test_what_xla_refuses_is_found_by_halving_and_blamed_once(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    """Three reversals among two hundred ops, all of sums: the first is searched for, the others are its like."""
    tried: list[bool] = []
    compile_ = CpuClient.compile

    def refuse(client: CpuClient, module: bytes, limits: Any, partitions: int = 1) -> Any:
        tried.append(b"reverse" in module)
        if tried[-1]:
            raise CompileError("no reversals here")
        return compile_(client, module, limits)

    def model(x: torch.Tensor) -> torch.Tensor:
        for i in range(100):
            x = x.asinh() + 1
            x = x.flip(0) if i in (20, 50, 80) else x
        return x

    monkeypatch.setattr(CpuClient, "compile", refuse)
    compiled = torch.compile(model, backend="dynaxla")
    x = torch.randn(5)
    with recorder.expect(graphs=1, compiles=4, eager_ops=3):
        for _ in range(2):
            assert_close(compiled(x), model(x))
    # The graph, at the call and in the search; eight beginnings of it; the four parts.
    assert len(tried) <= 2 + 8 + 4


@torch.no_grad()
def test_a_gradient_of_a_whole_slice_is_itself(recorder: Recorder) -> None:
    """As a scatter of no indices it is one that XLA's compiler dies of, if it is turned around."""

    def model(g: torch.Tensor) -> torch.Tensor:
        return aten.slice_backward(g, [5, 4], 0, 0, 2**63 - 1, 1).flip(0)

    g = torch.randn(5, 4)
    with recorder.expect(compiles=1, eager_ops=0):
        assert_close(torch.compile(model, backend="dynaxla")(g), model(g))
