"""Forks, and the end of a process, while children compile: nothing hangs, and nobody is left over."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.async_compile.ended import until
from tests.lists import quick

LIMIT_S = 150.0
START = """
import os, sys, time
import torch, dynaxla
from dynaxla.runtime_state import process

torch.set_num_threads(1)

def step(x):
    for _ in range(12):
        x = (x.softmax(1) @ x.mT @ x).tanh()
    return x

compiled = torch.compile(step, backend="dynaxla", dynamic=True, options={"compile": "behind"})

@torch.no_grad()
def check(size):
    x = torch.randn(size, 8)
    torch.testing.assert_close(compiled(x), step(x), rtol=1e-4, atol=1e-4)

def served():
    metrics = dynaxla.read_metrics()
    return metrics.served_own

def until_own(size):
    before = served()
    end = time.monotonic() + 100
    while served() == before:
        assert time.monotonic() < end
        check(size)
        time.sleep(0.01)

def pids():
    return [child.pid for child in process().compile_service.children if child.pid is not None]
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("moment", quick(["starting", "busy"], "starting"))
def test_a_process_ends_while_a_child_is_at_work(moment: str) -> None:
    """No hang, no abort, and no child behind it."""
    wait = "until_own(5)" if moment == "busy" else ""
    done = _run(f"{wait}\ncheck(5), check(40)\nprint(*pids(), flush=True)")
    assert done.returncode == 0, done.stderr
    children = [int(pid) for pid in done.stdout.split()]
    assert children
    until(lambda: not any(map(_is_alive, children)))


def test_children_end_with_a_process_that_is_killed() -> None:
    done = _run("check(5)\nwhile not pids():\n    pass\nprint(*pids(), flush=True)\nos.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    children = [int(pid) for pid in done.stdout.split()]
    assert children
    until(lambda: not any(map(_is_alive, children)))


def test_a_forked_child_compiles_behind_its_own_calls() -> None:
    program = """
check(5), check(40)  # the second is under way when the process forks
pid = os.fork()
until_own(40)
if pid == 0:
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(status)
"""
    done = _run(program)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr[-2000:]


def test_children_stand_behind_their_process_at_the_processor() -> None:
    """Linux compares niceness only within a session where it groups processes by theirs (`sched_autogroup_enabled`)."""
    done = _run(
        """
check(5)
until_own(5)
for pid in pids():
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + 10), os.getpriority(os.PRIO_PROCESS, pid)
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C goes to the process alone
"""
    )
    assert done.returncode == 0, done.stderr
