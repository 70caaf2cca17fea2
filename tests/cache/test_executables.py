"""Executables outlive their process: what is found on disk is what would have been compiled."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.cache.key import Key
from dynaxla.cache.store import Store
from dynaxla.errors import CompileError
from dynaxla.isolation.disk import CACHE_VARIABLE
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.executable_cache import KIND, ExecutableCache, _take
from dynaxla.runtime.pjrt_clients import CpuClient
from tests.lowering.user_program import load
from tests.tolerances import assert_close


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of the process that the tests' functions are compiled in."""
    made = Store(tmp_path / "cache")
    own = dataclasses.replace(shared.process(), executables=ExecutableCache(made), functions=FunctionTable())
    monkeypatch.setattr(backend, "process", lambda: own)
    return made


def compile_anew(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", options=options or None)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))


@pytest.mark.parametrize("model", ["Model", "Looped", "Stack"])
@torch.no_grad()
def test_a_program_is_found_from_other_lines(model: str, store: Store, recorder: Recorder, tmp_path: Path) -> None:
    for name, blank, compiles in (("first", 0, 1), ("second", 7, 0)):
        compiled = compile_anew(getattr(load(tmp_path, name, blank)[0], model)())
        with recorder.expect(compiles=compiles, loads=1 - compiles):
            compiled(torch.randn(4, 8))


@torch.no_grad()
def test_what_was_compiled_is_loaded(store: Store, recorder: Recorder) -> None:
    model = mlp()
    for compiles in (1, 0):
        compiled = compile_anew(model)
        x = torch.randn(5, 8)
        with recorder.expect(compiles=compiles, loads=1 - compiles):
            assert_close(compiled(x), model(x))
        with recorder.expect(compiles=0, loads=0):
            assert_close(compiled(x + 1), model(x + 1))


@torch.no_grad()
def test_each_tier_counts_what_it_is_used_for(store: Store, recorder: Recorder) -> None:
    model, x = mlp(), torch.randn(5, 8)
    loading_s = recorder.snapshot().loading_s
    compile_anew(model)(x)
    first = store.uses()
    assert recorder.snapshot().loading_s == loading_s
    assert first["executable"].misses == first["metadata"].misses > 0
    assert first["executable"].written_bytes > 1000
    compile_anew(model)(x)
    again = store.uses()
    assert recorder.snapshot().loading_s > loading_s
    assert (first["executable"].hits, again["executable"].hits) == (0, again["metadata"].hits)
    assert again["executable"].read_bytes == first["executable"].written_bytes
    assert sum(use.hits for use in again.values()) == store.counters().hits


@torch.no_grad()
def test_weights_are_the_callers(store: Store, recorder: Recorder) -> None:
    """Another module of the same shape has the same program, and its own weights."""
    for number in range(2):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
        x = torch.randn(2, 3, 9, 9)
        with recorder.expect(compiles=1 - number, folds=1 - number, loads=number, fold_loads=number):
            assert_close(compile_anew(model)(x), model(x))


@torch.no_grad()
def test_buckets(store: Store, recorder: Recorder) -> None:
    model = mlp()
    for known in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="dynaxla", dynamic=True)
        with recorder.expect(compiles=0 if known else 2, loads=2 if known else 0):
            for rows in (5, 7, 20):
                x = torch.randn(rows, 8)
                assert_close(compiled(x), model(x))


def test_training(store: Store, recorder: Recorder) -> None:
    model = mlp()
    x = torch.randn(5, 8)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for compiles in (2, 0):
        model.zero_grad()
        with recorder.expect(compiles=compiles, loads=2 - compiles):
            compile_anew(model)(x).square().sum().backward()
        for p, want in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            assert_close(p.grad, want)


def product(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "compiles"),
    [
        (lambda: compile_anew(product), 0),
        (lambda: compile_anew(product, matmul_precision="default"), 1),
        (lambda: compile_anew(lambda x: (x @ x.t()).log_softmax(-1)), 1),
        (lambda: compile_anew(lambda x: (x @ x.t()).softmax(-2)), 1),
        (lambda: compile_anew(lambda x: (x @ (x + 0.0).t()).softmax(-1)), 1),
        (lambda: compile_anew(product, cache=False), 1),
    ],
)
def test_another_program_is_not_found(
    change: Callable[[], Callable[[Tensor], Tensor]], compiles: int, store: Store, recorder: Recorder
) -> None:
    x = torch.randn(4, 4)
    compile_anew(product)(x)
    with recorder.expect(compiles=compiles, loads=1 - compiles):
        change()(x)


@torch.no_grad()
def test_constants_dtypes_and_sizes_are_part_of_the_key(store: Store, recorder: Recorder) -> None:
    def run(number: Any, x: Tensor) -> None:
        assert_close(compile_anew(lambda x: x * number)(x), x * number)

    with recorder.expect(compiles=7, loads=1):
        for number, x in (
            (2, torch.ones(3)),
            (2.0, torch.ones(3)),
            (2.5, torch.ones(3)),
            (2, torch.ones(4)),
            (2, torch.ones(3, 1)),
            (2, torch.ones(3, dtype=torch.int64)),
            (2, torch.ones(3, dtype=torch.float64)),
            (2, torch.zeros(3)),
        ):
            run(number, x)


@torch.no_grad()
def test_a_sub_graph_is_found_by_its_lowered_module_or_not_at_all(store: Store, recorder: Recorder) -> None:
    for sign in (1, -1):
        model = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * sign, lambda x: x.cos(), (x,))  # noqa: E731, B023
        x = torch.ones(3)
        with recorder.expect(compiles=1, loads=0):
            assert_close(compile_anew(model)(x), model(x))


@torch.no_grad()
def test_a_lowering_of_the_users_is_part_of_the_key(store: Store, recorder: Recorder) -> None:
    import jax.numpy as jnp

    torch.library.define("dynaxla_tests::kept", "(Tensor x) -> Tensor")
    torch.library.impl("dynaxla_tests::kept", "CompositeExplicitAutograd", lambda x: x * 2)
    torch.library.register_fake("dynaxla_tests::kept", torch.empty_like)
    target = torch.ops.dynaxla_tests.kept.default
    x = torch.arange(3.0)
    for factor in (2.0, 3.0):
        dynaxla.register_lowering(target, lambda x, factor=factor: jnp.multiply(x, factor), replace=factor > 2)
        with recorder.expect(compiles=1, loads=0):
            assert_close(compile_anew(target)(x), x * factor)


@torch.no_grad()
def test_an_executable_that_cannot_be_loaded_is_compiled_anew(
    store: Store, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model, load, refused = torch.randn(5, 8), mlp(), CpuClient._load, [True]

    def refuse_once(client: CpuClient, *given: Any) -> Any:
        if refused.pop() if refused else False:
            raise CompileError("made for another processor")
        return load(client, *given)

    compile_anew(model)(x)
    monkeypatch.setattr(CpuClient, "_load", refuse_once)
    for compiles in (1, 0):
        with recorder.expect(compiles=compiles, loads=1 - compiles):
            assert_close(compile_anew(model)(x), model(x))
    assert store.counters().corrupt == 1


@torch.no_grad()
def test_a_damaged_entry_is_compiled_anew(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    x, model = torch.randn(5, 8), mlp()
    compile_anew(model)(x)
    (entry,) = (tmp_path / "cache").rglob(f"*.{KIND}")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    with recorder.expect(compiles=1, loads=0):
        assert_close(compile_anew(model)(x), model(x))
    assert store.counters().corrupt == 1


SCRIPT = """
import json, sys, torch, dynaxla
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
x = torch.randn(5, 8)
how = {"backend": "dynaxla"}
with torch.no_grad():
    wrong = (torch.compile(net, **how)(x) - net(x)).abs().max().item()
    square = x.T @ x + torch.eye(8)
    for solve in (torch.linalg.inv, lambda x: torch.linalg.cholesky_ex(x)[0]):  # which XLA leaves to LAPACK
        wrong = max(wrong, (torch.compile(solve, **how)(square) - solve(square)).abs().max().item())
read = dynaxla.read_metrics()
assert "torch._inductor.select_algorithm" not in sys.modules  # keys of captures need no back end of Inductor
print(json.dumps([read.compiles, read.loads, read.captures_loaded, wrong]))
"""


def test_a_second_process_captures_and_compiles_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, CACHE_VARIABLE: str(tmp_path / "cache")}
    told = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    assert [counts[:3] for counts in told] == [[3, 0, 0], [0, 3, 3]]
    assert all(counts[3] < 1e-5 for counts in told)


SAVE = """
import sys, torch, dynaxla
net = torch.nn.Linear(8, 3)
torch.compile(net, backend="dynaxla")(torch.randn(5, 8))
content, info = torch.compiler.save_cache_artifacts()
open(sys.argv[1], "wb").write(content)
"""
LOAD = """
import sys, torch, dynaxla
assert torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read()) is not None
net = torch.nn.Linear(8, 3)
torch.compile(net, backend="dynaxla")(torch.randn(5, 8))
print(dynaxla.read_metrics().compiles, dynaxla.read_metrics().loads)
"""


def test_torchs_artifacts_carry_executables_to_another_cache(tmp_path: Path) -> None:
    for name, script in (("one", SAVE), ("other", LOAD)):
        environ = {**os.environ, CACHE_VARIABLE: str(tmp_path / name)}
        command = [sys.executable, "-c", script, str(tmp_path / "artifacts")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]


def test_damaged_artifacts_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    _take("0" * 64, b"x" * 100)
    assert "damaged" in caplog.text
    assert Store(tmp_path).get(KIND, Key("0" * 64)) is None
