"""Tensors and models over eight devices of the CPU, in processes of their own: torch has one device "dynaxla" per process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from dynaxla.device.registration import PLATFORM_VARIABLE
from dynaxla.isolation.disk import CACHE_VARIABLE

ROOT = Path(__file__).parents[2]
LONGEST_S = 1200
PLUGIN = "lammps-jax-pjrt-cpu"

_ON_A_PLUGIN = """
import sys, torch, dynaxla

dynaxla.use(sys.argv[1])
mesh = dynaxla.make_mesh((2, 2), ("data", "model"))
x, w, b = torch.randn(16, 8), torch.randn(8, 12), torch.randn(12)
there = dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w.to("dynaxla"), mesh, (None, "model")), b.to("dynaxla")
f = lambda x, w, b: (x @ w + b).softmax(1)
for run in (f, torch.compile(f, backend="dynaxla", options={"fallback": "error"})):
    y = run(*there)
    torch.testing.assert_close(y.cpu(), f(x, w, b))
assert dynaxla.sharding(there[2]).spec == (None,)
dynaxla.shard(there[1], mesh, ("model",))
assert dynaxla.sharding(there[1]).spec == ("model", None)
assert torch.equal(there[1].cpu(), w)
there[0].mul_(2).zero_().copy_(x)
assert dynaxla.sharding(there[0]).spec == ("data", None)
assert torch.equal(there[0].cpu(), x)
"""

_TWICE = """
import sys, torch, dynaxla

dynaxla.use("cpu", devices=8)
mesh = dynaxla.make_mesh((2, 4), ("data", "model"))
f = torch.compile(lambda x: torch.tanh(x).cumsum(1), backend="dynaxla")
x = torch.arange(128.0).reshape(16, 8) / 100
for spec in (("data",), (None, "model")):
    y = f(dynaxla.shard(x, mesh, spec))
    torch.testing.assert_close(y.cpu(), torch.tanh(x).cumsum(1))
    print(dynaxla.sharding(y))
metrics = dynaxla.read_metrics()
print(metrics.compiles, metrics.loads)
"""

pytestmark = pytest.mark.timeout(LONGEST_S + 60)


def _run(*command: str, **environ: str) -> str:
    """What Python prints in a process of its own, whose output is shown where it fails."""
    kept = {key: value for key, value in os.environ.items() if key != PLATFORM_VARIABLE}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=kept | environ, timeout=LONGEST_S
    )
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _run_file(name: str) -> None:
    """Runs the tests of a file of `on_mesh`, which are collected only there."""
    _run("-m", "pytest", "-p", "no:cacheprovider", "--full", f"tests/spmd/on_mesh/{name}.py")


@pytest.mark.parametrize(
    "name", ["check_tensors", "check_graphs", "check_windows", "check_programs", "check_serving", "check_checkpoints"]
)
def test_on_a_mesh(name: str) -> None:
    _run_file(name)


@pytest.mark.long
def test_models_on_a_mesh() -> None:
    _run_file("check_models")


def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    """Programs of two shardings are found on disk by their keys, with the shardings of their results."""
    *first, compiled = _run("-c", _TWICE, **{CACHE_VARIABLE: str(tmp_path)}).splitlines()
    *second, loaded = _run("-c", _TWICE, **{CACHE_VARIABLE: str(tmp_path)}).splitlines()
    assert first == second
    assert (compiled, loaded) == ("2 0", "0 2")


@pytest.mark.plugin
def test_a_plugin_with_several_devices() -> None:
    """XLA's CPU behind PJRT's C API, whose memory is reached by copies, as a TPU's is."""
    (library,) = [str(file.locate()) for file in files(PLUGIN) or () if file.suffix == ".so"]
    _run("-c", _ON_A_PLUGIN, library, XLA_FLAGS="--xla_force_host_platform_device_count=4")
