"""Processes, threads and what is left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.device.storage import storage_of
from dynaxla.errors import ExecutionError, ForkError
from tests.cache.forking import forked, status_of

ROOT = Path(__file__).parents[2]


def test_nothing_is_left_of_dropped_tensors() -> None:
    gc.collect()
    memories = device_in_use().memories
    before, held = len(memories), torch.dynaxla.memory_allocated()
    for _ in range(10_000):
        torch.empty(3, device="dynaxla")
    x = torch.ones(64, device="dynaxla", requires_grad=True)
    for _ in range(200):
        (x * x.detach().exp()).sum().backward()  # tensors that autograd alone holds
        x.grad = None
    assert len(memories) == before + 1
    del x
    gc.collect()
    assert (len(memories), torch.dynaxla.memory_allocated()) == (before, held)


def test_contexts_of_other_devices_are_as_before() -> None:
    """Also where the first one is entered after `use`."""
    program = (
        "import torch, dynaxla; dynaxla.use('cpu')\n"
        "for name in ('meta', 'dynaxla:0'):\n"
        "    with torch.device(name):\n"
        "        made = [torch.asarray(x) for x in (3, torch.ones(2, device='cpu').numpy(), torch.ones(2, device='cpu'))]\n"
        "    assert [str(x.device) for x in (*made, torch.ones(1, device=name))] == 4 * [name], made"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_errors_leave_nothing() -> None:
    x, before = torch.ones(2, device="dynaxla"), len(device_in_use().memories)
    caught = 0
    for _ in range(20):
        try:
            x @ torch.ones(3, 3, device="dynaxla")
        except RuntimeError:
            caught += 1
    gc.collect()
    assert caught == 20
    assert len(device_in_use().memories) == before
    assert x.tolist() == [1, 1]


def test_a_forked_child_is_told() -> None:
    x = torch.ones(2, device="dynaxla")

    def compute() -> None:
        for work in (lambda: x + 1, lambda: torch.ones(2, device="dynaxla"), lambda: x.cpu()):
            with pytest.raises(ForkError, match=f"forked from one that holds the {torch.dynaxla.platform()} device"):
                work()
        assert torch.dynaxla._is_in_bad_fork()
        torch.manual_seed(0)

    assert status_of(forked(compute)) == 0
    assert (x + 1).tolist() == [2, 2]


def _spawned(queue: multiprocessing.Queue) -> None:
    dynaxla.use()
    queue.put((torch.ones(3, device="dynaxla") * 2).tolist())


def test_a_spawned_child_has_its_own() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_spawned, args=(queue,))
    child.start()
    assert queue.get(timeout=120) == [2, 2, 2]
    child.join()


def test_threads() -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        x = torch.full((4,), float(number), device="dynaxla", requires_grad=True)
        for _ in range(20):
            y = (x * number + 1).square().sum()
            y.backward()
        assert x.grad is not None
        found[number] = x.grad.tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [20.0 * 2 * n * (n * n + 1)] * 4 for n in range(4)}


def test_a_failed_run_is_told_where_it_is_read() -> None:
    x = torch.ones(2, device="dynaxla") * 3
    memory = storage_of(x)
    assert memory.made_by is not None
    assert memory.made_by.startswith("aten.mul.Tensor at ")
    assert __file__ in memory.made_by
    error = memory.make_error(RuntimeError("out of memory"))
    assert isinstance(error, ExecutionError)
    assert "aten.mul.Tensor at" in str(error)
    assert "out of memory" in str(error)


_ALONE = """
import sys
import dynaxla
assert "torch" not in sys.modules
import torch
try:
    torch.device("dynaxla")
except RuntimeError:
    pass
else:
    raise AssertionError("the device is there before it is used")
print(dynaxla.use(), torch.dynaxla.platform())
"""


def test_the_device_is_made_on_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["dynaxla", "cpu"], done.stderr[-2000:]
