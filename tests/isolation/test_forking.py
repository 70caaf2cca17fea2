"""Forked children run what the parent compiled, compile for themselves, and end as they should. Every one has a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lists import quick

LIMIT_S = 150.0

# Eager's own threads (OpenMP) do not survive a fork: the programs compare with eager on one.
START = """
import os, signal, sys, threading, time, traceback
import multiprocessing as mp
import torch
import dynaxla

torch.set_num_threads(1)

def compile(f, **kwargs):
    return torch.compile(f, backend="dynaxla", **kwargs)

@torch.no_grad()
def check(compiled, eager, *args):
    torch.testing.assert_close(compiled(*args), eager(*args), rtol=1e-5, atol=1e-5)

def fork(work, limit_s=100, end=os._exit):
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(limit_s)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    end(0)

def wait(*pids):
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        assert status == 0, status

model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 12)).eval()
compiled = compile(model, dynamic=True)
"""


def _run(program: str, folder: Path) -> None:
    script = folder / "program.py"
    script.write_text(START + program)
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=output, stderr=output, start_new_session=True, env=dict(os.environ)
        )
        try:
            status: int | str = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = "it hung"
        with contextlib.suppress(ProcessLookupError):  # where all of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()


def test_a_child_runs_what_the_parent_compiled_and_compiles_for_itself(tmp_path: Path) -> None:
    """With weights and what is folded from them, at a new size, a new graph; its own child does the same."""
    _run(
        """
x, larger = torch.randn(10, 12), torch.randn(70, 12)
check(compiled, model, x)

def square(x):
    return torch.softmax(x @ x.T, -1)

def as_before():
    with dynaxla.recorder().expect(compiles=0, graphs=0):
        check(compiled, model, x)

def anew():
    as_before()
    with dynaxla.recorder().expect(compiles=1):
        check(compiled, model, larger)
    check(compile(square), square, x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    check(compiled, model, x)
    wait(fork(grandchild))

def grandchild():
    with dynaxla.recorder().expect(compiles=0):
        check(compiled, model, larger)
    check(compiled, model, larger.repeat(3, 1))

wait(fork(as_before))
wait(fork(anew, end=sys.exit))
wait(fork(lambda: None, end=sys.exit))
with dynaxla.recorder().expect(compiles=1):
    check(compiled, model, larger)
""",
        tmp_path,
    )


@pytest.mark.long
def test_training_goes_on_in_a_child(tmp_path: Path) -> None:
    _run(
        """
x = torch.randn(10, 12)
model.train()

def gradients(f, x):
    model.zero_grad()
    f(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]

def train(*sizes):
    for rows in sizes:
        x = torch.randn(rows, 12)
        torch.testing.assert_close(gradients(compiled, x), gradients(model, x), rtol=1e-4, atol=1e-5)

train(10)
wait(fork(lambda: train(10, 90)))
""",
        tmp_path,
    )


@pytest.mark.long
def test_a_fork_beside_threads_that_compile(tmp_path: Path) -> None:
    """Dynamo captures, parts are traced and XLA compiles when the forks come, and the parent goes on."""
    _run(
        """
def work():
    for rows in (3, 40, 150, 500):
        check(compiled, model, torch.randn(rows, 12))
    for power in range(4):
        check(compile(lambda x: torch.sin(x) ** power + power), lambda x: torch.sin(x) ** power + power, torch.randn(9))

def in_child():
    check(compiled, model, torch.randn(40, 12))
    check(compile(torch.cos), torch.cos, torch.randn(5))

failed = []
threading.excepthook = lambda told: failed.append(told)
thread = threading.Thread(target=work)
thread.start()
pids = []
while thread.is_alive() and len(pids) < 3:
    time.sleep(0.5)
    pids.append(fork(in_child))
wait(*pids)
thread.join()
assert pids and not failed, failed
""",
        tmp_path,
    )


@pytest.mark.long
def test_workers_of_a_data_loader(tmp_path: Path) -> None:
    _run(
        """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = torch.full((5 + 40 * (index % 2), 12), float(index))
        with torch.no_grad():
            return compiled(x)

def collate(batch):
    whole = torch.cat(batch)
    return whole, scale(whole)

def double(x):
    return x * 2 + x.shape[0]

scale = compile(double)
check(compiled, model, torch.randn(10, 12))
loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
batches = list(loader)
assert len(batches) == 3
for number, (whole, scaled) in enumerate(batches):
    x = torch.cat([torch.full((5 + 40 * (i % 2), 12), float(i)) for i in (2 * number, 2 * number + 1)])
    with torch.no_grad():
        torch.testing.assert_close(whole, model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled, double(whole))
check(compiled, model, torch.randn(10, 12))
""",
        tmp_path,
    )


@pytest.mark.long
@pytest.mark.parametrize("method", quick(["fork", "spawn", "forkserver"], "fork"))
def test_processes_of_multiprocessing(method: str, tmp_path: Path) -> None:
    _run(
        f"""
def work(weights, rows):
    model.load_state_dict(weights)
    for count in rows:
        check(compiled, model, torch.randn(count, 12))

if __name__ == "__main__":
    check(compiled, model, torch.randn(10, 12))
    process = mp.get_context({method!r}).Process(target=work, args=(model.state_dict(), (10, 70)))
    process.start()
    process.join(100)
    assert process.exitcode == 0, process.exitcode
""",
        tmp_path,
    )


@pytest.mark.long
def test_workers_forked_by_a_server_that_is_warm(tmp_path: Path) -> None:
    """As gunicorn with preload_app: the parent warms up, its workers serve, and one that ends is forked again."""
    _run(
        """
from dynaxla.errors import NotServing
from dynaxla.bucket_policy import Explicit
from dynaxla.serving import Server, Settings

example = torch.randn(4, 12)
dynaxla.mark_bucketed(example, 0, policy=Explicit((4, 8)), min=2, max=8)
with torch.no_grad():
    assert dynaxla.warmup(compiled, (example,), progress=False) == 2
dynaxla.freeze(compiled, on_miss="error")
settings = Settings(max_size=8, max_batch=4)

@torch.no_grad()
def run(batch):
    return [compiled(x) for x in batch]

parents = Server(run, len, settings)
parents.start()
parents.wait_until_ready()

def serve():
    try:
        parents.submit(example)
    except NotServing:
        pass
    else:
        raise AssertionError("a server without its thread takes requests")
    with Server(run, len, settings) as server, dynaxla.recorder().expect(compiles=0):
        for rows in (2, 3, 7):
            x = torch.randn(rows, 12)
            check(lambda x: server.submit(x).result(60), model, x)
    other = torch.randn(30, 12)
    check(compile(torch.tanh), torch.tanh, other)

wait(*[fork(serve, end=sys.exit) for _ in range(2)])
wait(fork(serve))
x = torch.randn(5, 12)
check(lambda x: parents.submit(x).result(60), model, x)
parents.drain()
""",
        tmp_path,
    )


@pytest.mark.long
def test_a_device_that_the_parent_holds_is_named(tmp_path: Path) -> None:
    """The host's own device stands in for one that no two processes can hold."""
    _run(
        """
from dynaxla.errors import ForkError
from dynaxla.options import Options
from dynaxla.runtime import pjrt_clients, xla

client = pjrt_clients.HostTransferClient(xla.embedded_cpu(), xla.embedded_cpu().devices()[0], "tpu")
module = b"func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }"
executable = client.compile(module, Options().compile_limits)

def raises(act):
    try:
        act()
    except ForkError as error:
        assert error.id == "DX150" and "spawn" in error.hint
    else:
        raise AssertionError("it did something")

def in_child():
    raises(lambda: client.compile(module, Options().compile_limits))
    raises(lambda: client.to_buffer(torch.ones(3)))
    raises(lambda: executable.run([]))

wait(fork(in_child), fork(in_child, end=sys.exit))
""",
        tmp_path,
    )
