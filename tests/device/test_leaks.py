"""What stays of many calls, and of calls that raise: nothing."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.loaded_executables import PjrtExecutable

ROOT = Path(__file__).parents[2]

_HEAD = """
import gc, torch, dynaxla
from dynaxla.device.registration import device_in_use
dynaxla.use()
torch.set_num_threads(1)

def megabytes():
    gc.collect()
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["VmRSS"].split()[0]) / 1024
"""

_SIZES_AGAIN = """
def step(n):
    x = torch.empty(n, 3, device="dynaxla", requires_grad=True)
    ((x + 1.0) * 2.0).sum().backward()

def calls(count):
    for number in range(count):
        step(number % 12 + 1)

calls(600)
before, live, compiles = megabytes(), len(device_in_use().memories), dynaxla.read_metrics().compiles
calls(2000)
print(megabytes() - before, len(device_in_use().memories) - live, dynaxla.read_metrics().compiles - compiles)
"""
"""Ten thousand ops in the second loop, and their backward."""

_BUCKETS = """
def f(x):
    return (x * 2 + x.mean()).relu().sum(0)

compiled = torch.compile(f, backend="dynaxla", dynamic=True)

def calls(count):
    for number in range(count):
        compiled(torch.empty(number % 14 + 3, 8, device="dynaxla"))

with torch.no_grad():
    calls(1000)
    before, live, compiles = megabytes(), len(device_in_use().memories), dynaxla.read_metrics().compiles
    calls(10_000)
print(megabytes() - before, len(device_in_use().memories) - live, dynaxla.read_metrics().compiles - compiles)
"""


def _measured(script: str) -> tuple[float, int, int]:
    """How many megabytes the process grew by, how many memories stayed, and how many programs were compiled."""
    done = subprocess.run([sys.executable, "-c", _HEAD + script], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, live, compiles = done.stdout.split()
    return float(grown), int(live), int(compiles)


@pytest.mark.parametrize("script", [_SIZES_AGAIN, _BUCKETS], ids=["eager", "buckets"])
def test_ten_thousand_calls_leave_nothing(script: str) -> None:
    grown, live, compiles = _measured(script)
    assert (live, compiles) == (0, 0)
    assert grown < 4, f"{grown:.1f} MB"  # 1 kB for a call would be 10


def _executables() -> int:
    gc.collect()
    return sum(isinstance(each, PjrtExecutable) for each in gc.get_objects())


def test_programs_of_sizes_that_do_not_come_again_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_in_use().eager, "_programs", ProgramCache(8))
    before = _executables()
    for n in range(901, 931):
        assert (torch.ones(n) * 2).sum() == (torch.ones(n).to("dynaxla") * 2).cpu().sum()
    assert _executables() <= before + 8


def _compiled(x: Tensor) -> Tensor:
    y = x * 2
    return y @ torch.ones(7, 7, device="dynaxla")


def _unsupported(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def _fails_backward(x: Tensor) -> None:
    y = x.exp()
    with torch.no_grad():
        y.add_(1)
    y.sum().backward()


def _out_of_bounds(x: Tensor) -> Tensor:
    return x.as_strided((5,), (100,), 3)


FAILING: dict[str, Callable[[Tensor], object]] = {
    "shapes": lambda x: x + torch.ones(4, device="dynaxla"),
    "devices": lambda x: x + torch.ones(3),
    "dtypes": lambda x: x.bitwise_and(x),
    "indices": lambda x: torch.nn.functional.cross_entropy(x, torch.ones(2, 2, device="dynaxla").long()),
    "out": lambda x: torch.add(x, x, out=torch.ones(2, 3, dtype=torch.int64, device="dynaxla")),
    "views": _out_of_bounds,
    "backward": _fails_backward,
    "unsupported": _unsupported,
    "compiled": torch.compile(_compiled, backend="dynaxla"),
}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = len(device_in_use().memories), torch.dynaxla.memory_allocated()
    logging.disable()  # pytest keeps what is logged, with the frames of the errors
    yield
    logging.disable(logging.NOTSET)
    gc.collect()
    assert (len(device_in_use().memories), torch.dynaxla.memory_allocated()) == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", FAILING)
def test_errors_leave_nothing(kind: str) -> None:
    x = torch.ones(2, 3, device="dynaxla", requires_grad=kind == "backward")
    caught = 0
    for _ in range(12 if kind == "compiled" else 120):
        try:
            FAILING[kind](x)
        except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchRuntimeError):
            caught += 1
    assert caught == (12 if kind == "compiled" else 120)
    assert x.sum().item() == 6
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_left")
def test_threads_work_while_another_raises() -> None:
    found: list[float] = []
    done = threading.Event()
    caught = []

    def raise_errors() -> None:
        x = torch.ones(2, 3, device="dynaxla")
        while not done.is_set():
            try:
                x @ x
            except RuntimeError:
                caught.append(1)

    def work(number: int) -> None:
        x = torch.full((5,), float(number), device="dynaxla", requires_grad=True)
        for _ in range(100):
            (x * x + number).sum().backward()
        assert x.grad is not None
        found.append(x.grad.sum().item() - 100 * 2 * 5 * number)

    raising = threading.Thread(target=raise_errors)
    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in (raising, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    raising.join()
    assert found == [0.0] * 3
    assert caught


def test_compiles_of_ops_are_counted() -> None:
    before = dynaxla.read_metrics().compiles
    x = torch.empty(1237, device="dynaxla")
    for _ in range(3):
        x * 3.0
    assert dynaxla.read_metrics().compiles == before + 1
