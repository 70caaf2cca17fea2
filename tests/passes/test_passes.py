"""The passes: a wrong one is found in a dump, what they say of themselves, and that each is an option."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.observe.compare_passes import compare_passes, main
from dynaxla.observe.dump import Dump
from dynaxla.options import DEBUG_VARIABLE
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.passes.pass_order import FOR_ALL, FOR_PARTS
from dynaxla.targets.registry import find_target
from tests.tolerances import assert_close

aten = torch.ops.aten
building = importlib.import_module("dynaxla.graph_builder")


class Net(torch.nn.Module):
    """Something for most of the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(3, 4, 3)
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(self.norm(self.convolution(x)).mean(-1)) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        z = torch.nn.functional.dropout(y, 0.5)
        return torch.cond(z.sum() > 0, lambda a: a + 1, lambda a: a - 1, (z,)), y, y[0]


def net() -> Net:
    made = Net().eval()
    made.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
    return made


def subtracts(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    """Deliberately wrong."""
    for node in graph.module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.target = aten.sub.Tensor
    return graph


def _dumped(function: Callable[..., Any], folder: Path, patch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    """The compiled function, called once, with the passes' dump."""
    patch.setenv(DEBUG_VARIABLE, f"dump={folder},stages=passes")
    compiled = torch.compile(function, backend="dynaxla", **options)
    compiled(*args)
    return compiled


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_graph_on_the_way_gives_the_same(dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _dumped(net(), tmp_path, monkeypatch, torch.randn(3, 3, 7), dynamic=dynamic)
    (folder,) = tmp_path.iterdir()
    steps = compare_passes(folder)
    del compiled  # and with it the operator that its control flow became
    changed = ["output_aliases", "constant_lifting", "higher_order_calls", "seed_inputs", "batch_norm_folding"]
    changed += ["transposed_matmul", "channels_last_convolution", "dead_code_elimination"]
    assert [step.name for step in steps] == ["captured", *changed]
    assert not any(step.error for step in steps)
    assert max(step.difference for step in steps) < 1e-6


@torch.no_grad()
def test_a_wrong_pass_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        building, "FOR_PARTS", (*FOR_PARTS[:5], Pass("subtracts", subtracts, "Deliberately wrong."), *FOR_PARTS[5:])
    )
    _dumped(lambda x, w: torch.sin(x) @ w.t() * x, tmp_path, monkeypatch, torch.randn(3, 3), torch.randn(3, 3))
    (folder,) = tmp_path.iterdir()
    steps = compare_passes(folder)
    assert [step.name for step in steps] == ["captured", "subtracts", "transposed_matmul", "dead_code_elimination"]
    wrong = [step.name for step in steps if step.difference > 1e-3]
    assert wrong == ["subtracts"]


def test_a_graph_that_does_not_run_is_said_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = Dump(tmp_path, ("passes",))
    for name, result in {"captured": "tensors['a']", "fails": "1 + 'no number'", "doubles": "2 * tensors['a']"}.items():
        dump.write_pass(name, f"def run(tensors): return [{result}]", {"a": torch.ones(3)})
    assert dump.folder is not None
    assert main([str(dump.folder)]) == 0
    _, captured, fails, doubles = capsys.readouterr().out.splitlines()
    assert captured.split() == ["captured", "0.0e+00"]
    assert "TypeError" in fails
    assert doubles.split() == ["doubles", "1.0e+00"]
    assert main([str(tmp_path)]) == 2


def test_a_dump_is_compared_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step: its forward, then its backward; and a write into part of an input."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w.t()).sum()

    x = torch.randn(3, 5, requires_grad=True)
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path},stages=passes")
    torch.compile(step, backend="dynaxla")(x, torch.randn(4, 5)).backward()

    def write(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[:, at] = row
        return cache.sum(1)

    with torch.no_grad():
        torch.compile(write, backend="dynaxla")(torch.zeros(2, 1024, 128), torch.ones(2, 1, 128), torch.tensor([3]))
    folders = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "dynaxla.observe.compare_passes", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    forward, backward, writes = (lines.index([f"{folder.name}:"]) for folder in folders)
    assert [line[0] for line in lines[forward + 1 : backward]] == [
        "captured",
        "transposed_matmul",
        "dead_code_elimination",
    ]
    assert lines[backward + 1][0] == "captured"
    assert [line[0] for line in lines[writes + 1 :]][:2] == ["captured", "in_place_writes"]
    assert all(float(line[1]) < 1e-6 for line in lines if len(line) > 1), done.stdout


@torch.no_grad()
def test_without_a_pass_that_may_be_left_out_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other targets do not run those that pay on one alone."""
    optional = [each for each in FOR_PARTS if each.pays_on is not None]
    names = ["transposed_matmul", "unmerged_linear", "channels_last_convolution", "channels_last_values"]
    assert [each.name for each in optional] == names
    monkeypatch.setattr(building, "FOR_PARTS", tuple(each for each in FOR_PARTS if each.pays_on is None))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.Flatten(1), torch.nn.Linear(96, 4)
    ).eval()
    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    for n in (3, 5):
        x = torch.randn(n, 3, 4, 4)
        assert_close(compiled(x), model(x))


def test_passes_say_what_they_guarantee() -> None:
    for each in (*FOR_ALL, *FOR_PARTS):
        module = importlib.import_module(f"dynaxla.passes.{each.name}")
        assert module.PASS is each, "a pass stands in a module of its name"
        assert len(each.guarantees) > 20
    names = [each.name for each in (*FOR_ALL, *FOR_PARTS)]
    assert len(set(names)) == len(names)


def test_the_documentation_lists_the_passes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = text.partition("| pass | guarantees | pays |")[2].partition("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    listed = {"cpu": "CPU", "tpu": "TPU"}

    def where(each: Pass) -> str:
        if each.pays_on is None:
            return "everywhere"
        return ", ".join(title for name, title in listed.items() if each.pays_on(find_target(name)))

    expected = [(each.name, each.guarantees, where(each)) for each in (*FOR_ALL, *FOR_PARTS)]
    assert [(row[1].strip(" `"), row[2].strip(), row[3].strip()) for row in rows] == expected
    optional = [each.pays_on for each in FOR_PARTS if each.pays_on is not None]
    assert not any(pays(find_target(name)) for pays in optional for name in ("cuda", "rocm"))
