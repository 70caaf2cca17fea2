"""DYNAXLA_DEBUG=dump=DIR writes every stage of every program; a repro is a script that runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dynaxla.observe.dump import Dump
from dynaxla.observe.repro import write_repro
from dynaxla.options import DEBUG_VARIABLE, STAGES
from tests.partition.test_fallback import triple

TANH = """
func.func @main(%a: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  %0 = torch.aten.tanh %a : !torch.vtensor<[4],f32> -> !torch.vtensor<[4],f32>
  return %0 : !torch.vtensor<[4],f32>
}
"""
UNKNOWN = TANH.replace("torch.aten.tanh %a :", 'torch.operator "torch.pkg.op"(%a) :').replace(
    ": !torch.vtensor<[4],f32> -> ", ": (!torch.vtensor<[4],f32>) -> "
)


def _files(root: Path) -> dict[str, list[str]]:
    return {folder.name: sorted(f.name for f in folder.iterdir()) for folder in sorted(root.iterdir())}


def _first_graph() -> str:
    return f"p{os.getpid()}_graph_000"


@torch.no_grad()
def test_two_stages_of_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path / 'ir'},stages=fx+stablehlo")
    torch.compile(lambda x: torch.tanh(x) * 2, backend="dynaxla")(torch.randn(3))
    assert _files(tmp_path / "ir") == {_first_graph(): ["01_fx_0.txt", "03_stablehlo_0.mlir"]}
    folder = tmp_path / "ir" / _first_graph()
    assert "aten.tanh" in (folder / "01_fx_0.txt").read_text()
    assert "stablehlo.tanh" in (folder / "03_stablehlo_0.mlir").read_text()


@torch.no_grad()
def test_every_stage_and_one_file_per_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path}")
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend="dynaxla", dynamic=True)
    for n in (3, 4, 3):
        compiled(torch.randn(n))
    names = ["01_fx_{}.txt", "02_torch_{}.mlir", "03_stablehlo_{}.mlir", "04_hlo_{}.txt"]
    programs = [name.format(k) for name in names for k in (0, 1)]
    assert _files(tmp_path) == {_first_graph(): sorted(["00_passes_00_captured.py", *programs])}
    folder = tmp_path / _first_graph()
    assert "!torch.vtensor<[3],f32>" in (folder / "02_torch_0.mlir").read_text()
    assert "HloModule" in (folder / "04_hlo_0.txt").read_text()
    assert "f32[3]" in (folder / "04_hlo_0.txt").read_text()
    assert "f32[4]" in (folder / "04_hlo_1.txt").read_text()


@torch.no_grad()
def test_two_graphs_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path},stages=hlo")

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compile(model, backend="dynaxla")(torch.randn(3))
    assert _files(tmp_path) == {f"p{os.getpid()}_graph_00{n}": ["04_hlo_0.txt"] for n in (0, 1)}


@torch.no_grad()
def test_the_parts_around_an_eager_op_share_their_graphs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path},stages=fx+hlo")
    torch.compile(lambda x: triple(torch.tanh(x)).cos(), backend="dynaxla")(torch.randn(3))
    assert _files(tmp_path) == {_first_graph(): ["01_fx_0.txt", "01_fx_1.txt", "04_hlo_0.txt", "04_hlo_1.txt"]}


@torch.no_grad()
def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    torch.compile(lambda x: torch.tanh(x) * 2, backend="dynaxla")(torch.randn(3))
    assert not list(tmp_path.iterdir())
    silent = Dump(None, STAGES)
    assert not silent.enabled
    assert silent.folder is None
    assert silent.write("fx", "text") is None


@pytest.mark.long
def test_the_variable_as_a_user_sets_it(tmp_path: Path) -> None:
    """In a process of its own: the environment alone, no line of Python about it."""
    script = "import torch; torch.compile(lambda x: torch.tanh(x), backend='dynaxla')(torch.ones(3))"
    environ = {**os.environ, DEBUG_VARIABLE: f"dump={tmp_path},stages=fx+stablehlo"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environ, timeout=120)
    (files,) = _files(tmp_path).values()
    assert files == ["01_fx_0.txt", "03_stablehlo_0.mlir"]
    assert re.fullmatch(r"p\d+_graph_000", next(iter(_files(tmp_path))))


def test_a_programs_files_share_its_number_after_a_failure(tmp_path: Path) -> None:
    dump = Dump(tmp_path, ("fx", "hlo"))
    dump.write("fx", "fails after this")
    dump.write("fx", "succeeds")
    assert dump.write("stablehlo", "not asked for") is None
    written = dump.write("hlo", "succeeded")
    assert written is not None
    assert written.name == "04_hlo_1.txt"


def test_programs_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    dump = Dump(tmp_path, STAGES)
    barrier = threading.Barrier(8)

    def compile_one(name: str) -> None:
        for stage in STAGES[1:]:
            barrier.wait()
            dump.write(stage, name)

    threads = [threading.Thread(target=compile_one, args=(f"program {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dump.folder is not None
    texts: dict[str, set[str]] = {}
    for file in dump.folder.iterdir():
        texts.setdefault(file.stem.rpartition("_")[2], set()).add(file.read_text())
    assert sorted(map(len, texts.values())) == [1] * 8


def test_folders_are_never_shared(tmp_path: Path) -> None:
    folders = {Dump(tmp_path / "deep" / "root", STAGES).folder for _ in range(3)}
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("module", "expected"), [(TANH, "Lowered"), (UNKNOWN, "LoweringRejected")], ids=["good", "bad"]
)
def test_a_repro_runs(module: str, expected: str, tmp_path: Path) -> None:
    script = write_repro("torch-mlir", module, "why", "1.9.0", tmp_path)
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(expected), done.stdout
    assert "exit status 0" in done.stdout


def test_a_repro_is_a_script_whatever_the_reason_says(tmp_path: Path) -> None:
    reason = 'said """quoted""" and \\N and \\x and C:\\user {0} {module} and ended so: "\\'
    script = write_repro("torch-mlir", TANH, reason, "1.9.0", tmp_path)
    ast.parse(script.read_text())
    assert "{module} and ended so" in script.read_text()
    assert write_repro("torch-mlir", TANH, reason, "1.9.0", tmp_path) == script, "the same failure gives the same file"
    assert write_repro("torch-mlir", UNKNOWN, reason, "1.9.0", tmp_path) != script
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".py", ".py"], "no file half-written is left"
