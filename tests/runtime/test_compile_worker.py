"""XLA's CPU compiler may die, hang or eat memory: the program runs in eager from the op on that it fails on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from jax import lax

from dynaxla.errors import CompileCrashed, CompileError, CompileOutOfMemory, CompileTimeout, CompileUnavailable
from dynaxla.isolation.failures import KnownFailures
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.runtime import executable_info, xla
from dynaxla.runtime.compile_worker import CompileWorker
from dynaxla.runtime.executable_info import (
    PLAIN_LOOPS,
    WIDE_VECTORS,
    ModuleRequest,
    Override,
    SerializedExecutable,
    find_overrides,
)
from dynaxla.runtime.pjrt_clients import cpu_client
from tests.killed_children import killing
from tests.tolerances import assert_close

LIMITS = Limits(60.0, 8 << 30)
# The simplifier takes the element of a window over equal elements for a constant, without looking, and aborts.
DEADLY = """
func.func public @main(%x: tensor<0xi1>, %i: tensor<2x1xi32>) -> tensor<2xi64> {
  %true = stablehlo.constant dense<true> : tensor<i1>
  %0 = stablehlo.constant dense<0> : tensor<i64>
  %init = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<i64>) -> tensor<i64>
  %all = stablehlo.reduce(%x init: %true) applies stablehlo.and across dimensions = [0] : (tensor<0xi1>, tensor<i1>) -> tensor<i1>
  %one = stablehlo.broadcast_in_dim %all, dims = [] : (tensor<i1>) -> tensor<1xi1>
  %two = "stablehlo.gather"(%one, %i) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1>}> : (tensor<1xi1>, tensor<2x1xi32>) -> tensor<2xi1>
  %counts = stablehlo.convert %two : (tensor<2xi1>) -> tensor<2xi64>
  %sum = "stablehlo.reduce_window"(%counts, %init) <{padding = dense<[[1, 0]]> : tensor<1x2xi64>, window_dimensions = array<i64: 2>}> ({
    ^bb0(%a: tensor<i64>, %b: tensor<i64>):
      %c = stablehlo.add %a, %b : tensor<i64>
      stablehlo.return %c : tensor<i64>
  }) : (tensor<2xi64>, tensor<i64>) -> tensor<2xi64>
  return %sum : tensor<2xi64>
}
"""  # noqa: E501
GOOD = "func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {\n  return %x : tensor<3xf32>\n}"


@pytest.fixture
def worker() -> Iterator[CompileWorker]:
    made = CompileWorker(KnownFailures(), inject_faults=True)
    yield made
    made.pool.close()


def test_xla_dies_of_this_module(worker: CompileWorker) -> None:
    """Should this fail, XLA has learned: find another deadly module."""
    with pytest.raises(CompileCrashed, match="Check failed"):
        worker.compile(DEADLY.encode(), LIMITS)
    assert worker.compile(GOOD.encode(), LIMITS)


@pytest.mark.parametrize(
    ("fault", "seconds", "kind"),
    [("abort", 60.0, CompileCrashed), ("sleep", 0.3, CompileTimeout), ("allocate", 60.0, CompileOutOfMemory)],
)
def test_a_fault_ends_the_child_and_the_next_module_gets_a_new_one(
    fault: str, seconds: float, kind: type[CompileError], worker: CompileWorker
) -> None:
    with pytest.raises(kind):
        worker.compile(f"fault:{fault}".encode(), Limits(seconds, 8 << 30))
    assert worker.compile(GOOD.encode(), LIMITS)


def test_a_module_whose_children_are_killed_is_tried_by_later_processes(tmp_path: Path) -> None:
    worker = CompileWorker(KnownFailures(tmp_path / "failures.jsonl"), inject_faults=True)
    with killing(lambda: worker.pool.children[0].pid), pytest.raises(CompileUnavailable, match="ended by SIGKILL"):
        worker.compile(b"fault:sleep", LIMITS)
    worker.pool.close()
    assert not (tmp_path / "failures.jsonl").exists()


def test_a_limit_of_the_process_on_its_memory_is_kept() -> None:
    """`ulimit -v`, below what a child may have by the options: no child may raise it."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "import torch, dynaxla\n"
        "x = torch.ones(3)\n"
        "assert torch.equal(torch.compile(lambda x: x.relu() + x, backend='dynaxla')(x), x + x)\n"
        "assert 'in eager' not in dynaxla.report(), dynaxla.report()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_a_refused_module_leaves_the_child_alive(worker: CompileWorker) -> None:
    assert worker.compile(GOOD.encode(), LIMITS)
    pid = worker.pool.children[0].pid
    for module in (b"", b"not a module", b"\xff\x00", GOOD.replace("f32", "f99").encode()):
        with pytest.raises(CompileError) as caught:
            worker.compile(module, LIMITS)
        assert type(caught.value) is CompileError
    assert worker.compile(GOOD.encode(), LIMITS)
    assert worker.pool.children[0].pid == pid


def test_a_deadly_module_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    first = CompileWorker(KnownFailures(path))
    with pytest.raises(CompileCrashed):
        first.compile(DEADLY.encode(), LIMITS)
    first.pool.close()
    assert json.loads(path.read_text())["error_id"] == "DX321"
    second = CompileWorker(KnownFailures(path))
    with pytest.raises(CompileCrashed, match="remembered"):
        second.compile(DEADLY.encode(), LIMITS)
    assert second.pool.children[0].pid is None, "it was tried again"


def test_requests_at_once_go_to_as_many_children_as_there_may_be() -> None:
    worker = CompileWorker(KnownFailures(), most=2)
    meet = threading.Barrier(3)

    def compile_one(size: int) -> bytes | None:
        meet.wait()
        return worker.compile(GOOD.replace("3xf32", f"{size}xf32").encode(), LIMITS)

    with ThreadPoolExecutor(3) as threads:
        assert worker.compile(GOOD.encode(), LIMITS)
        first, second = worker.pool.children
        assert first.pid is not None
        assert second.pid is None, "one at a time needs one child"
        assert all(threads.map(compile_one, (4, 5, 6)))
        assert second.pid is not None
    worker.pool.close()
    assert (first.pid, second.pid) == (None, None)


def test_what_cannot_be_serialized_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileWorker, "compile", lambda self, module, limits, partitions: None)
    client = cpu_client()
    x = torch.arange(3.0)
    (result,) = client.compile(GOOD.encode(), LIMITS).run([client.to_buffer(x)])
    assert_close(client.to_tensor(result), x)


@torch.no_grad()
def test_the_program_runs_in_eager_where_xla_dies(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body that `cumsum` has on other platforms lets XLA see a window over constants, without its barrier."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)
    monkeypatch.setattr(lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.index_select(x.all(-1, keepdim=True), 0, torch.zeros(3, dtype=torch.int64))
        return torch.cumsum(chosen, 0) * 2, chosen

    compiled, x = torch.compile(model, backend="dynaxla"), torch.zeros(0, dtype=torch.int32)
    for _ in range(2):
        for mine, eager in zip(compiled(x), model(x), strict=True):
            assert_close(mine, eager)
    told = [line for line in recorder.snapshot().fallbacks if "compile_crashed" in line]
    assert told
    assert "aten.cumsum.default" in told[-1]
    script = told[-1].rpartition("repro: ")[2]
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "exit status -6" in done.stdout, done.stdout + done.stderr


def test_the_child_needs_no_torch() -> None:
    code = "import sys; from dynaxla.runtime import compile_worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


def test_an_executable_from_the_child_can_be_asked() -> None:
    executable = cpu_client().compile(GOOD.encode(), LIMITS)
    assert "ENTRY" in executable.hlo_text()
    assert executable.memory_use().arguments_bytes == 12
    assert isinstance(executable.cost(), dict)
    assert xla.embedded_cpu() is xla.embedded_cpu()


def test_a_program_on_few_elements_is_compiled_by_plain_loops() -> None:
    few = GOOD.replace("return %x", "%y = stablehlo.add %x, %x : tensor<3xf32>\n  return %y").encode()
    many = few.replace(b"tensor<3x", b"tensor<30000x")
    assert isinstance(xla.compile_module(ModuleRequest(few)), SerializedExecutable)
    assert find_overrides(few) == [PLAIN_LOOPS]
    assert find_overrides(many) == []
    assert find_overrides(few + b" " * 10_000) == []
    assert find_overrides(few.replace(b"stablehlo.add", b"stablehlo.while")) == []
    assert find_overrides(b"ML\xefR bytecode") == []


@pytest.mark.parametrize(("flags", "found"), [("avx512f avx512_bf16", [WIDE_VECTORS]), ("avx512f", []), (None, [])])
def test_vectors_are_as_wide_as_the_processor_does_well(
    flags: str | None, found: list[Override], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executable_info, "host", lambda: {} if flags is None else {"flags": flags})
    options = executable_info.choose_loops(xla.compile_options(xla.embedded_cpu().devices()), b"bytecode")
    assert list(options.env_option_overrides) == found


@pytest.mark.skipif(not version("jaxlib").startswith("0.10."), reason="later versions have no such switch")
def test_a_program_without_transposes_is_compiled_without_tiles(tmp_path: Path) -> None:
    """XLA names a kernel's module by its emitter."""
    plain = GOOD.replace("return %x", "%y = stablehlo.rsqrt %x : tensor<3xf32>\n  return %y").replace("<3x", "<30000x")
    kernels = {}
    for name, module in {"plain": plain, "moved": plain + "// stablehlo.transpose"}.items():
        flags = f"--xla_dump_to={tmp_path / name} --xla_dump_hlo_as_text"
        code = "import sys; from dynaxla.runtime import xla; xla.compile_module(xla.ModuleRequest(sys.stdin.buffer.read()))"
        environment = dict(os.environ) | {"XLA_FLAGS": flags}
        subprocess.run([sys.executable, "-c", code], input=module.encode(), check=True, timeout=120, env=environment)
        kernels[name] = [file.name for file in (tmp_path / name).iterdir() if file.suffix == ".ll"]
    assert all("kernel_module" in file for file in kernels["plain"]), kernels
    assert not any("kernel_module" in file for file in kernels["moved"]), kernels
