"""Compiled packages: saved with every declared bucket, loaded where nothing can be lowered."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.errors import OptionError, PackageError
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime_state import process
from examples.package_embeddings import Embedder, embed, texts
from tests.tolerances import assert_close

WITHOUT_TORCH_MLIR = """
import sys, importlib.metadata
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch_mlir":
            raise ImportError(name)
sys.meta_path.insert(0, Forbidden())
known = importlib.metadata.version
def version(name):
    if name == "torch-mlir":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""

SAVE = """
import sys
from examples.package_embeddings import Embedder, save
save(sys.argv[1], Embedder(1, 32, 4, 50, 64).eval(), 8, 32)
print("{}")
"""

RUN = """
import json, dynaxla, torch
from examples.package_embeddings import Embedder, run, texts
model = Embedder(1, 32, 4, 50, 64).eval()
difference = run(sys.argv[1], model, range(8, 33))
metrics = dynaxla.read_metrics()
told = {name: getattr(metrics, name) for name in ("compiles", "folds", "loads", "captures_loaded", "eager_ops", "lowering_s")}
with open(sys.argv[1], "rb") as file, torch.no_grad():
    try:
        torch.compiler.load_compiled_function(file)(model, *texts(40, 50))
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
print(json.dumps({"difference": difference, "error": error, **told}))
"""


def looped(step: int) -> Callable[[Tensor], Tensor]:
    def go_on(i: Tensor, x: Tensor) -> Tensor:
        return i < 3

    def turn(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, x * step

    return lambda x: torch.while_loop(go_on, turn, (torch.zeros((), dtype=torch.int64), x))[1]


def scale(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).relu()


def in_a_process(code: str, *args: str) -> dict[str, object]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", code, *args], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_package_runs_at_every_length_without_torch_mlir(tmp_path: Path) -> None:
    """With other weights than it was made with, and nothing in a cache."""
    path = str(tmp_path / "package")
    in_a_process(SAVE, path)  # in this one the device may be in use, whose name torch then writes into the package
    found = in_a_process(WITHOUT_TORCH_MLIR + RUN, path)
    difference, error = found.pop("difference"), str(found.pop("error"))
    assert isinstance(difference, float)
    assert difference < 1e-5
    assert found == {"compiles": 0, "folds": 0, "loads": 3, "captures_loaded": 1, "eager_ops": 0, "lowering_s": 0.0}
    assert error.startswith("PackageError")
    assert "torch-mlir is not installed" in error


def test_a_package_trains(tmp_path: Path, recorder: Recorder) -> None:
    """Forward and backward, at every declared bucket; an undeclared one is compiled where it can be."""
    path = str(tmp_path / "package")
    example = torch.randn(4, 6)
    dynaxla.mark_bucketed(example, 0, policy=dynaxla.PowersOfTwo(), min=2, max=8)
    made = torch.compile(scale, backend="dynaxla", fullgraph=True).aot_compile(((nn.Linear(6, 3), example), {}))
    made.save_compiled_function(path)
    with open(path, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    model, eager = nn.Linear(6, 3), nn.Linear(6, 3)
    eager.load_state_dict(model.state_dict())

    def step(rows: int) -> None:
        x = torch.randn(rows, 6)
        loaded(model, x).square().sum().backward()
        scale(eager, x).square().sum().backward()
        assert_close(model.weight.grad, eager.weight.grad)

    with recorder.expect(compiles=0, loads=6):
        for rows in (2, 3, 8, 5):
            step(rows)
    with recorder.expect(compiles=2, loads=0):
        step(11)


UNUSED = """
import json, sys, torch
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2, x * 1
    @staticmethod
    def backward(ctx, first, second): return first * 2 + second.exp()
def several(x): return x * 2, x.log(), *Own.apply(x)
if sys.argv[2] == "save":
    example = torch.ones(3, requires_grad=True)
    made = torch.compile(several, backend="dynaxla", fullgraph=True).aot_compile(((example,), {}))
    made.save_compiled_function(sys.argv[1])
    print("{}")
else:
    with open(sys.argv[1], "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    x = torch.zeros(3, requires_grad=True)
    gradients = [torch.autograd.grad(loaded(x)[i].sum(), x)[0].tolist() for i in (0, 2)]
    import dynaxla
    metrics = dynaxla.read_metrics()
    print(json.dumps({"gradients": gradients, "compiles": metrics.compiles, "loads": metrics.loads}))
"""


def test_a_package_whose_results_are_not_all_used(tmp_path: Path) -> None:
    """It has the programs of a backward of all results; that of fewer is compiled. It knows what is of a user's `backward`."""
    path = str(tmp_path / "package")
    in_a_process(UNUSED, path, "save")
    found = in_a_process(UNUSED, path, "load")
    assert found["gradients"] == [[2, 2, 2], [3, 3, 3]]
    assert found["loads"] == 1


@torch.no_grad()
def test_a_package_keeps_its_buckets(tmp_path: Path) -> None:
    path, example, model = str(tmp_path / "package"), torch.randn(40, 6), nn.Linear(6, 3)
    torch._dynamo.mark_dynamic(example, 0)
    before = set(process().parts)
    torch.compile(scale, backend="dynaxla")(model, example)
    assert [process().parts[each].adapts_buckets for each in set(process().parts) - before] == [True]
    made = torch.compile(scale, backend="dynaxla", fullgraph=True).aot_compile(((model, example), {}))
    made.save_compiled_function(path)
    before = set(process().parts)
    with open(path, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    x = torch.randn(30, 6)
    assert_close(loaded(model, x), scale(model, x))
    assert [process().parts[each].adapts_buckets for each in set(process().parts) - before] == [False]


@torch.no_grad()
def test_the_weights_of_a_package_are_the_callers(tmp_path: Path, recorder: Recorder) -> None:
    """Work on weights alone is of the package too, and is done anew when they change."""
    path, model = str(tmp_path / "package"), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 9, 9)
    torch.compile(scale, backend="dynaxla", fullgraph=True).aot_compile(((model, x), {})).save_compiled_function(path)
    with open(path, "rb") as file, recorder.expect(compiles=0, folds=0):
        loaded = torch.compiler.load_compiled_function(file)
        for _ in range(2):
            assert_close(loaded(model, x), scale(model, x))
            model[0].weight.mul_(2)


def test_packages_that_are_made_after_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop torch can tell no key, and draws one from Python's generator: each function has its own all the same.

    Nothing of them is in torch's cache, where nobody could look for it.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    made = []
    for step in (2, 3):
        options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        random.seed(5)
        compiled: Any = torch.compile(looped(step), backend="dynaxla", fullgraph=True, options=options)
        made.append(compiled.aot_compile(((torch.ones(3),), {})))
        assert random.random() == random.Random(5).random()
    assert [each(torch.ones(3)).tolist() for each in made] == [[8.0] * 3, [27.0] * 3]
    assert not list(tmp_path.glob("torch/aotautograd/*"))


@torch.no_grad()
def test_a_damaged_package_says_so(tmp_path: Path) -> None:
    path = tmp_path / "package"
    torch.compile(embed, backend="dynaxla", fullgraph=True).aot_compile(
        ((Embedder(1, 32, 4, 50, 64).eval(), *texts(8, 50)), {})
    ).save_compiled_function(str(path))
    content = path.read_bytes()
    place = content.index(b"dynaxla\n") + 3000
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with path.open("rb") as file, pytest.raises(PackageError, match="damaged"):
        torch.compiler.load_compiled_function(file)


@torch.no_grad()
def test_more_buckets_than_programs_are_kept() -> None:
    example = torch.randn(4, 6)
    dynaxla.mark_bucketed(example, 0, policy=dynaxla.Multiples(1), min=2, max=9)
    compiled = torch.compile(scale, backend="dynaxla", fullgraph=True, options={"max_executables": 3})
    with pytest.raises(PackageError, match="8 buckets are declared, and options keep 3 programs"):
        compiled.aot_compile(((nn.Linear(6, 3), example), {}))


def test_errors_of_a_package_are_its_makers() -> None:
    compiled = torch.compile(scale, backend="dynaxla", fullgraph=True, options={"cache": 1})
    with pytest.raises(OptionError):
        compiled.aot_compile(((nn.Linear(6, 3), torch.randn(4, 6)), {}))
