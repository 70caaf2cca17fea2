"""The device's tests again, on a PJRT plugin: XLA's CPU behind PJRT's C API, asynchronous and reached by copies, as a TPU is.

torch has one device "dynaxla" per process, so each list runs in a process of its own, which DYNAXLA_PLATFORM tells the plugin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from dynaxla.device.registration import PLATFORM_VARIABLE

ROOT = Path(__file__).parents[2]
PACKAGE = "lammps-jax-pjrt-cpu"
LONGEST_S = 1500
FILES = sorted(path.stem for path in (ROOT / "tests/device").glob("test_*.py"))
SHARES = 4
QUICK = ("test_memories", "test_module", "test_transfers")

pytestmark = [pytest.mark.plugin, pytest.mark.timeout(LONGEST_S + 60)]

_FIRST_OPS = """
import sys, torch, dynaxla
from dynaxla.device.registration import device_in_use

dynaxla.use(sys.argv[1])
assert not device_in_use().client.shares_host_memory
x = torch.arange(1 << 16, dtype=torch.float32)
there = (x.to("dynaxla") * 2).requires_grad_()
there.square().sum().backward()
assert torch.equal(there.grad.cpu(), 4 * x)
read = there.detach().cpu()
with torch.no_grad():
    there.add_(1)
assert torch.equal(read, 2 * x)
assert torch.equal(there.detach().cpu(), 2 * x + 1)
f = torch.compile(lambda x: (x @ x.T).relu(), backend="dynaxla", dynamic=True, options={"fallback": "error"})
for rows in (3, 5, 9):
    y = torch.randn(rows, 4)
    torch.testing.assert_close(f(y.to("dynaxla")).cpu(), (y @ y.T).relu())
assert "memory of the programs" in dynaxla.report()  # a plugin need not know what a program costs
assert "who lowers what" in str(dynaxla.explain(f, y.to("dynaxla")))
"""


@pytest.fixture(scope="module")
def plugin() -> str:
    (found,) = [file for file in files(PACKAGE) or () if file.suffix == ".so"]
    return str(found.locate())


def _run(*command: str, plugin: str) -> None:
    """Runs Python on the plugin, in a process whose output is shown where it fails."""
    environ = {**os.environ, PLATFORM_VARIABLE: plugin}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environ, timeout=LONGEST_S
    )
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"


def test_the_first_ops_on_a_plugin_that_is_called_as_the_cpu_is(plugin: str) -> None:
    _run("-c", _FIRST_OPS, plugin, plugin=plugin)


def test_a_quick_list_of_the_devices_tests(plugin: str) -> None:
    _run("-m", "pytest", "-p", "no:cacheprovider", *[f"tests/device/{name}.py" for name in QUICK], plugin=plugin)


@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
def test_all_of_the_devices_tests(share: int, plugin: str) -> None:
    """A process runs every fourth file: files share what was lowered and imported, and a failure names its test."""
    names = [name for name in FILES if name not in QUICK][share::SHARES]
    _run("-m", "pytest", "-p", "no:cacheprovider", *[f"tests/device/{name}.py" for name in names], plugin=plugin)
