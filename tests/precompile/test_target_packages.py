"""Packages made by `python -m dynaxla compile`: every bucket and its backward, for a process that compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.__main__ import main
from dynaxla.cache.package import PackageWriter, read_package
from dynaxla.cache.store import Store
from dynaxla.errors import CompileError, OptionError, UnsupportedError
from dynaxla.isolation.disk import CACHE_VARIABLE
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.targets.tpu import TpuClient
from tests.precompile.test_compile_for_target import TARGET, Attention, needs_libtpu
from tests.tolerances import assert_close

BUCKETS = ["x:1=8..16", "x:0=2,4"]


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    print("the factory's own words")
    return Attention().eval(), (torch.randn(3, 10, 32),)


def factors() -> tuple[Any, tuple[torch.Tensor]]:
    """Of a matrix that cannot be padded."""
    return (lambda x: torch.linalg.lu_factor(x)[0].abs()), (torch.randn(9, 9),)


def compile_command(*arguments: str, factory: str = "model") -> int:
    return main(["compile", f"{__name__}:{factory}", *arguments])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed = capsys.readouterr()
    assert "the factory's own words" in printed.err
    return json.loads(printed.out)  # type: ignore[no-any-return]


def serve(monkeypatch: pytest.MonkeyPatch, cache: Path, package: Path) -> Store:
    """Puts a package behind the cache of the process that the test's functions are compiled in."""
    store = Store(cache, behind=[package])
    own = dataclasses.replace(shared.process(), executables=ExecutableCache(store))
    monkeypatch.setattr(backend, "process", lambda: own)
    return store


def call_at(compiled: Any, eager: Any, sizes: list[tuple[int, int]], train: bool) -> None:
    for batch, length in sizes:
        x = torch.randn(batch, length, 32)
        dynaxla.mark_bucketed(x, 1, min=8, max=16)
        dynaxla.mark_bucketed(x, 0, policy=dynaxla.Explicit((2, 4)), max=4)
        result = compiled(x)
        expected = eager(x)
        assert_close(result, expected)
        if train:
            weights = list(eager.parameters())
            for mine, other in zip(*(torch.autograd.grad(y.sum(), weights) for y in (result, expected)), strict=True):
                assert_close(mine, other)


@pytest.mark.parametrize("train", [False, True])
def test_a_package_has_every_program_that_traffic_needs(
    train: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recorder: Recorder,
) -> None:
    package = tmp_path / "package"
    arguments = [f"--bucket={bucket}" for bucket in BUCKETS] + ["--train"] * train
    assert compile_command("--target", "cpu", "--json", "--out", str(package), *arguments) == 0
    told = document(capsys)
    combinations = [{"x:1": length, "x:0": batch} for batch in (4, 2) for length in (16, 8)]
    kinds = ("program", "backward") if train else ("program",)
    assert {(tuple(p["sizes"].items()), p["kind"]) for p in told["programs"]} == {
        (tuple(sizes.items()), kind) for sizes in combinations for kind in kinds
    }
    assert len(told["programs"]) == 4 * len(kinds)
    assert all(program["padded"] and program["flops"] > 0 for program in told["programs"])
    manifest = read_package(package)
    assert {**manifest, "package": str(package)} == {"format": 2, **told}

    serve(monkeypatch, tmp_path / "cache", package)
    eager, _ = model()
    compiled = torch.compile(eager, backend="dynaxla")
    with torch.set_grad_enabled(train), recorder.expect(compiles=0, folds=0, loads=4 * len(kinds), eager_ops=0):
        call_at(compiled, eager, [(3, 10), (2, 16), (4, 8), (2, 13), (3, 9), (2, 8), (4, 16)], train)


def test_a_damaged_package_costs_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    eager, args = model()
    (report,) = dynaxla.compile_for_target(eager, args, target="cpu", buckets=["x:1=16"], out=tmp_path / "package")
    assert report.file is not None
    path = tmp_path / "package" / report.file.file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    store = serve(monkeypatch, tmp_path / "cache", tmp_path / "package")
    torch._dynamo.reset()
    (x,) = args
    dynaxla.mark_bucketed(x, 1, max=16, policy=dynaxla.Explicit((16,)))
    with torch.no_grad(), recorder.expect(compiles=1, loads=0):
        assert_close(torch.compile(eager, backend="dynaxla")(x), eager(x))
    assert store.counters().corrupt == 1


SERVE = """
import json, sys, torch, dynaxla
from tests.precompile.test_target_packages import model
net, (x,) = model()
dynaxla.mark_bucketed(x, 1, min=8, max=16)
with torch.no_grad():
    wrong = (torch.compile(net, backend="dynaxla")(x) - net(x)).abs().max().item()
read = dynaxla.read_metrics()
print(json.dumps([read.compiles, read.loads, wrong, "dynaxla.lowering.torch_mlir_passes" in sys.modules]))
"""


@pytest.mark.long
def test_another_process_finds_what_the_command_made(tmp_path: Path) -> None:
    package = tmp_path / "package"
    command = [
        "-m",
        "dynaxla",
        "compile",
        f"{__name__}:model",
        "--target=cpu",
        "--bucket=x:1=8..16",
        f"--out={package}",
    ]
    environ = {**os.environ, CACHE_VARIABLE: f"{tmp_path / 'cache'}{os.pathsep}{package}"}
    for arguments in (command, ["-c", SERVE]):
        done = subprocess.run(
            [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    compiles, loads, wrong, _ = json.loads(done.stdout.splitlines()[-1])
    assert (compiles, loads) == (0, 1)
    assert wrong < 1e-5


@needs_libtpu
def test_a_package_for_a_tpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    assert compile_command("--target", TARGET, "--bucket=x:1=8..16", "--train", "--json", "--out", str(package)) == 0
    told = document(capsys)
    assert [(p["kind"], p["sizes"]) for p in told["programs"]] == [
        (kind, {"x:1": length}) for length in (16, 8) for kind in ("program", "backward")
    ]
    assert told["complete"]
    assert told["refused"] == told["eager"] == told["exact_shapes"] == []
    assert told["device"]["device"] == "TPU v5 lite"
    chip = told["chip"]
    assert (chip["flops_per_s"], chip["hbm_bytes"], chip["hbm_bytes_per_s"]) == (197e12, 16 << 30, 819e9)
    for program in told["programs"]:
        compute_s, memory_s = program["flops"] / 197e12, program["accessed_bytes"] / 819e9
        assert program["roofline_s"] == max(compute_s, memory_s) > 0
        assert program["bound"] == ("compute" if compute_s > memory_s else "memory")
        assert program["intensity"] == program["flops"] / program["accessed_bytes"]
        memory = program["memory"]
        classes = [memory[f"{name}_bytes"] for name in ("arguments", "outputs", "temporaries", "code")]
        assert sum(classes) == memory["total_bytes"] < memory["hbm_bytes"] == 16 << 30
        assert program["fits"]
    assert {**read_package(package), "package": str(package)} == {"format": 2, **told}


@needs_libtpu
def test_a_live_tpu_would_look_for_the_same_keys() -> None:
    """As far as that can be told without one: a client with a topology's own device, build and count has its identity."""
    from dynaxla.targets.registry import compiler_for

    _, compiler = compiler_for(TARGET)
    told = compiler.identity()

    class Live:
        platform_version = told["version"]
        device_kind = told["device"]

        def devices(self) -> list[Any]:
            return [self]

    client = TpuClient.__new__(TpuClient)
    client._client = client._device = Live()
    client._lost = False
    assert client.identity() == told
    _, larger = compiler_for("tpu:v5e:2x2")
    assert larger.identity() != told


@needs_libtpu
def test_a_program_that_is_refused_leaves_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_rest = PjrtTopology.compile

    def refuse_first(self: PjrtTopology, module: bytes, limits: Limits, partitions: int) -> Any:
        monkeypatch.setattr(PjrtTopology, "compile", compile_rest)
        raise CompileError("it does not fit")

    monkeypatch.setattr(PjrtTopology, "compile", refuse_first)
    arguments = ("--target", TARGET, "--bucket=x:1=8,16", "--json", "--out", str(tmp_path / "package"))
    assert compile_command(*arguments) == 1
    told = document(capsys)
    assert told["refused"] == [{"name": "program 0", "sizes": {"x:1": 16}, "error": "DX320 it does not fit"}]
    assert [program["sizes"] for program in told["programs"]] == [{"x:1": 8}]
    assert (told["complete"], told["package"]) == (False, None)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, room = PackageWriter.add, [True]

    def add_while_there_is_room(self: PackageWriter, *given: Any) -> Any:
        if not room:
            raise OSError(28, "No space left on device")
        room.pop()
        return add(self, *given)

    monkeypatch.setattr(PackageWriter, "add", add_while_there_is_room)
    net, args = model()
    with pytest.raises(CompileError, match="No space left"):
        dynaxla.compile_for_target(net, args, target="cpu", buckets=["x:1=8,16"], out=tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_padded_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    function, args = factors()
    with pytest.raises(UnsupportedError, match="linalg_lu_factor_ex"):
        dynaxla.compile_for_target(
            function, args, target="cpu", buckets=["0:0,0:1=5,9"], options={"bucketing": "require"}
        )
    require = ("--options", '{"bucketing": "require"}')
    assert compile_command("--target", "cpu", "--bucket=x:0,x:1=5,9", *require, factory="factors") == 1
    assert "linalg_lu_factor_ex" in capsys.readouterr().err
    assert compile_command("--target", "cpu", "--bucket=x:0,x:1=5,9", "--json", factory="factors") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(program["sizes"], program["padded"]) for program in told["programs"]] == [
        ({"x:0": size}, False) for size in (9, 5)
    ]
    assert "linalg_lu_factor_ex" in told["exact_shapes"][0]


def test_marks_and_gradients_of_the_example_stay_as_they_were() -> None:
    net, (x,) = model()
    for bucket in ("x:1=16", "x:1=12"):
        (report, backward) = dynaxla.compile_for_target(net, (x,), target="cpu", buckets=[bucket], train=True)
        assert report.sizes == {"x:1": int(bucket[4:])}
        assert (report.kind, backward.kind) == ("program", "backward")
    assert not shared.process().marks.of(x)
    assert not hasattr(x, "_dynamo_dynamic_indices")
    assert all(parameter.grad is None for parameter in net.parameters())


def test_training_what_has_no_gradient() -> None:
    with pytest.raises(OptionError, match="nothing needs a gradient"):
        dynaxla.compile_for_target(torch.tanh, (torch.randn(3),), target="cpu", train=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bucket=y:1=8"], "no tensor 'y' among its arguments"),
        (["--bucket=x:7=8"], "no dim 7"),
        (["--bucket=x:1=16..8"], "no size lies between min=16 and max=8"),
        (["--bucket=x:1="], "has no sizes"),
        (["--options={"], "--options is no JSON"),
        (["--options=[]"], "--options is no JSON object"),
        (['--options={"fallbak": "error"}'], "did you mean 'fallback'"),
        (["--out=."], "is not empty"),
        (["--out=nowhere/package"], "there is no folder"),
    ],
)
def test_bad_usage(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        compile_command("--target", "cpu", "--out=package", *arguments)
    assert caught.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert os.listdir(tmp_path) == ["mine"]
