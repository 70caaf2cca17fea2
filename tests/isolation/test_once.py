"""What a process has once is made once, whichever threads ask for it first."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from dynaxla.isolation.once import once

THREADS = 6

SCRIPT = """
import threading, time
import torch
import dynaxla
from dynaxla.runtime_state import RuntimeState

init = RuntimeState.__post_init__

def make_slowly(state):
    time.sleep(3 if threading.current_thread().name == "read" else 1)  # they meet here, and one that reads is last
    init(state)

RuntimeState.__post_init__ = make_slowly
functions = [torch.compile(lambda x, n=n: x.sin() + n, backend="dynaxla", dynamic=False) for n in range(4)]
begin, results = threading.Barrier(len(functions) + 2), {}

def call(n):
    begin.wait()
    results[n] = functions[n](torch.ones(3))

def read():
    begin.wait()
    dynaxla.read_metrics()

threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
threads += [threading.Thread(target=read, name="read") for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert all(torch.allclose(results[n], torch.ones(3).sin() + n) for n in range(4))
print(dynaxla.read_metrics().graphs)
"""

WAITING = """
import threading, time
import dynaxla
from dynaxla.runtime_state import process
from dynaxla.torch_api.dynamo import compile_lock

def capture():
    with compile_lock:
        begin.wait()
        time.sleep(1)  # the other thread makes the state meanwhile, unless it waits for Dynamo's lock
        found.append(process())

begin, found = threading.Barrier(2), []
thread = threading.Thread(target=capture, daemon=True)
thread.start()
begin.wait()
dynaxla.read_metrics()
thread.join(60)
print(found == [process()])
"""


def test_threads_that_ask_at_once_get_the_same() -> None:
    calls: list[str] = []

    @once
    def make(name: str) -> list[str]:
        calls.append(name)
        time.sleep(0.05)
        return [name]

    begin, found = threading.Barrier(2 * THREADS), []

    def ask(name: str) -> None:
        begin.wait()
        found.append(make(name))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab" * THREADS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == ["a", "b"]
    assert len({id(each) for each in found}) == 2
    assert make("a") is make("a")


def test_what_cannot_be_made_is_tried_again() -> None:
    tries: list[int] = []

    @once
    def make() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError
        return 7

    try:
        make()
    except ValueError:
        assert make() == 7
    assert len(tries) == 2


def test_threads_that_compile_first_share_one_state() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == "4"


def test_who_makes_the_state_waits_for_no_capture() -> None:
    """A thread that captures holds Dynamo's lock, and asks for the state."""
    ran = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.split()[-1:] == ["True"], ran.stderr
