"""What happens to a server when its process ends without a drain: nothing is lost and nothing dies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lists import quick

START = """
import torch, dynaxla
from dynaxla.bucket_policy import Explicit
from dynaxla.serving import Server, Settings

settings = Settings(max_size=64, sizes=Explicit((8, 16, 32, 64)), max_batch=4, max_wait_s=0.5)
"""
SERVING = """
server = Server(lambda texts: [text.upper() for text in texts], len, settings)
server.start()
server.wait_until_ready()
server.submit("answered").add_done_callback(lambda future: print(future.result()))
"""
WARMING = """
def step(x):
    for _ in range(20):
        x = x.softmax(1) @ x.T @ x
    return x

compiled = torch.compile(step, backend="dynaxla")
example = torch.randn(4, 8)
dynaxla.mark_bucketed(example, 0, policy=dynaxla.Multiples(2), min=2, max=400)
server = Server(list, len, settings, prepare=lambda: dynaxla.warmup(compiled, (example,), progress=False))
server.start()
while dynaxla.read_metrics().compiles < 1:
    pass
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=120)


def test_accepted_requests_are_answered() -> None:
    done = _run(SERVING)
    assert (done.returncode, done.stdout) == (0, "ANSWERED\n"), done.stderr


def test_an_error_in_the_main_thread_ends_the_process() -> None:
    done = _run(SERVING + 'raise ValueError("of the main thread")')
    assert (done.returncode, done.stdout) == (1, "ANSWERED\n"), done.stderr
    assert "of the main thread" in done.stderr


@pytest.mark.parametrize("delay", quick([0.0, 0.3], 0.0))
def test_a_warm_up_ends_with_the_process(delay: float) -> None:
    done = _run(WARMING + f"import time; time.sleep({delay}); print(dynaxla.read_metrics().compiles < 150)")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
