"""Instructions of XLA say which module and which line of the user's program they come from; programs and keys do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.lowering.locations import find_call, split_name
from dynaxla.observe.recorder import Recorder
from dynaxla.options import DEBUG_VARIABLE
from dynaxla.profiling.hlo_sources import read_sources
from tests.lowering.user_program import load
from tests.tolerances import assert_close


def read_dump(folder: Path, stage: str) -> list[str]:
    return [file.read_text() for file in sorted(folder.rglob(f"*_{stage}_*"))]


def compile_dumped(
    model: nn.Module, dump: Path, monkeypatch: pytest.MonkeyPatch, *, gradients: bool = True, **options: Any
) -> None:
    torch.compiler.reset()
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={dump},stages=stablehlo+hlo")
    compiled = torch.compile(model, backend="dynaxla", options=options or None)
    with torch.set_grad_enabled(gradients):
        result = compiled(torch.randn(4, 8))
    if gradients:
        result.sum().backward()


def list_nested(hlo: str) -> set[tuple[str, str, int]]:
    """The names within calls with sub-graphs: those of the calls, their own, and how deep they are nested."""
    split = map(split_name, re.findall(r'op_name="([^"]*)"', hlo))
    numbered = ((outer, own, find_call(own)) for outer, own in split if outer)
    return {(o.rpartition(".")[0], own.rpartition(".")[0], n.count("_") // 2) for o, own, n in numbered if n}


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


def test_bodies_name_modules_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = load(tmp_path, "looping", 0)
    compile_dumped(module.Looped(), tmp_path / "dump", monkeypatch, gradients=False)
    (hlo,) = read_dump(tmp_path / "dump", "hlo")
    named = list_nested(hlo)
    assert {("while_loop", f"{own}", 1) for own in ("first.inner/linear", "first/_softmax", "second/linear")} <= named
    assert {("while_loop", "first/_softmax", 2), ("while_loop", "cosh", 2)} <= named
    softmax = [source for source in read_sources(hlo).values() if source.op == "_softmax" and source.file]
    assert {source.place for source in softmax} == {f"{tmp_path / 'looping.py'}:{line}"}
    assert {source.outer.op for source in softmax if source.outer} == {"while_loop", "cond"}
    inner = [source for source in read_sources(hlo).values() if source.op == "cosh"]
    assert {source.outer.op for source in inner if source.outer} == {"cond"}
    assert {source.outer.outer.op for source in inner if source.outer and source.outer.outer} == {"while_loop"}


def test_equal_loops_have_the_lines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_dumped(load(tmp_path, "twice", 0)[0].TwoLoops(), tmp_path / "dump", monkeypatch, gradients=False)
    (text,), (hlo,) = (read_dump(tmp_path / "dump", stage) for stage in ("stablehlo", "hlo"))
    copies = re.findall(r"func private @call\d+\.(dynaxla_regions\.of_\w+\.\w+)\(", text)
    assert len(copies) == 2
    assert len(set(copies)) == 1
    named = list_nested(hlo)
    assert {(f"{each}/while_loop", f"{each}.second/linear", 1) for each in ("left", "right")} <= named
    assert not {("left/while_loop", "right.second/linear", 1), ("right/while_loop", "left.second/linear", 1)} & named


def test_layers_of_one_graph_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_dumped(load(tmp_path, "stacked", 0)[0].Stack(), tmp_path / "dump", monkeypatch)
    forward, backward = read_dump(tmp_path / "dump", "hlo")
    layers = [f"layers.{n}" for n in (1, 2)]  # the first is inlined: its input needs no gradient
    inner = {(f"{each}/invoke_subgraph", f"{each}.block.inner/linear", 1) for each in layers}
    assert inner <= list_nested(forward)
    gradients = {
        (f"{each}/backward/invoke_subgraph", f"{each}.block/backward/_softmax_backward_data", 1) for each in layers
    }
    assert gradients <= list_nested(backward)


def test_gradients_of_a_branch_have_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_dumped(load(tmp_path, "branching", 0)[0].Branches(), tmp_path / "dump", monkeypatch)
    forward, backward = read_dump(tmp_path / "dump", "hlo")
    assert {(f"blocks.{n}/cond", f"blocks.{n}.inner/linear", 1) for n in (0, 1)} <= list_nested(forward)
    gradients = {(f"blocks.{n}/backward/cond", f"blocks.{n}/backward/{op}", 1) for n in (0, 1) for op in ("mm", "mul")}
    assert gradients <= list_nested(backward)


@pytest.mark.parametrize("model", ["Model", "Looped", "TwoLoops", "Stack"])
def test_texts_differ_in_locations_alone(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for name, blank in (("one", 0), ("two", 5)):
        module, _ = load(tmp_path, name, blank)
        compile_dumped(getattr(module, model)(), tmp_path / name, monkeypatch, gradients=False)
        texts += [read_dump(tmp_path / name, "stablehlo")[0]]
    programs = [text.partition("#call0 = ")[0] for text in texts]
    assert programs[0] == programs[1]
    assert texts[0] != texts[1]


def test_names_without_a_call() -> None:
    assert find_call("reduce") is None
    assert split_name("a/addmm.12") == ("", "a/addmm.12")
    assert split_name(":a/backward/addmm.7_0_5") == ("", "a/backward/addmm.7_0_5")
    assert split_name("m/scan.7/:a/scan.7_0_5/:b/add.7_0_5_0_3") == ("m/scan.7", "b/add.7_0_5_0_3")
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
