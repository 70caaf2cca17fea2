"""Instructions of XLA say which module and which line of the user's program they come from; programs and keys do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from dynaxla.lowering.locations import find_call
from dynaxla.observe.recorder import Recorder
from dynaxla.options import DEBUG_VARIABLE
from tests.lowering.user_program import load
from tests.tolerances import assert_close


def read_dump(folder: Path, stage: str) -> list[str]:
    return [file.read_text() for file in sorted(folder.rglob(f"*_{stage}_*"))]


def compile_dumped(model: nn.Module, dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={dump},stages=stablehlo+hlo")
    torch.compile(model, backend="dynaxla")(torch.randn(4, 8)).sum().backward()


def test_hlo_names_modules_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = load(tmp_path, "user_model", 0)
    compile_dumped(module.Model(), tmp_path / "dump", monkeypatch)
    forward, backward = read_dump(tmp_path / "dump", "hlo")
    names = set(re.findall(r'op_name="([^"]*)"', forward))
    assert {name.rpartition(".")[0] for name in names} >= {
        "blocks.0.inner/linear",
        "blocks.0/_softmax",
        "blocks.1.inner/linear",
        "blocks.1/_softmax",
        "sinh",
    }
    assert all(find_call(name) is not None for name in names)
    assert f"line={line} " in forward
    assert f'"{tmp_path / "user_model.py"}"' in forward
    gradients = {name.rpartition(".")[0] for name in re.findall(r'op_name="([^"]*)"', backward)}
    assert {"blocks.0/backward/_softmax_backward_data", "blocks.1/backward/_softmax_backward_data"} <= gradients
    assert "HloModule f_Model_forward." in forward


def test_texts_differ_in_locations_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for name, blank in (("one", 0), ("two", 5)):
        module, _ = load(tmp_path, name, blank)
        compile_dumped(module.Model(), tmp_path / name, monkeypatch)
        texts += [read_dump(tmp_path / name, "stablehlo")[0]]
    programs = [text.partition("#call0 = ")[0] for text in texts]
    assert programs[0] == programs[1]
    assert texts[0] != texts[1]


def test_names_without_a_call() -> None:
    assert find_call("reduce") is None
    assert find_call("a.b/addmm.12") == "12"


def test_any_file_has_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    folder = tmp_path / "größe \\b"
    folder.mkdir()
    module, line = load(folder, "odd", 0)
    with recorder.expect(compiles=2, eager_ops=0):
        compile_dumped(module.Model(), tmp_path / "dump", monkeypatch)
    forward, _ = read_dump(tmp_path / "dump", "hlo")
    assert f"line={line} " in forward
    assert "gr" in forward.partition("FileNames")[2].partition("FunctionNames")[0]


@torch.no_grad()
def test_any_name_is_a_name_of_a_module(recorder: Recorder) -> None:
    def größe(x: torch.Tensor) -> torch.Tensor:
        return x.sinh()

    x = torch.randn(3)
    with recorder.expect(compiles=1, eager_ops=0):
        assert_close(torch.compile(größe, backend="dynaxla")(x), x.sinh())
