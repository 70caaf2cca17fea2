"""Processes that end, or that run other programs: the others raise, and say who it was; nothing hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_HEAD = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
import dynaxla
from dynaxla.errors import DistributedError, ProcessLost, ProgramsDiffer
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
def caught(work):
    started = time.monotonic()
    try:
        work()
    except DistributedError as error:
        print(f"RAISED {type(error).__name__} after {time.monotonic() - started:.1f}: {error.explanation}", flush=True)
        time.sleep(3)  # with process 0 ends the service by which the others hear of it
        os._exit(7)
    print("PASSED", flush=True)
"""


def _run_script(body: str, size: int = 2, start: str = 'dynaxla.use("cpu")\n') -> tuple[list[str], float]:
    """What each of several processes printed, and the seconds that they took together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", _HEAD + start + textwrap.dedent(body)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, **pipes))
    started = time.monotonic()
    try:
        found = [child.communicate(timeout=150) for child in children]
    finally:
        for child in children:
            child.kill()
    return [out + err[:20000] for out, err in found], time.monotonic() - started


@pytest.mark.parametrize(
    ("killed", "size"), [(0, 2), pytest.param(1, 2, marks=pytest.mark.long), pytest.param(0, 3, marks=pytest.mark.long)]
)
def test_a_killed_process_is_named(killed: int, size: int) -> None:
    """With process 0 end the processes' store and JAX's coordination service, at whose end JAX would end the others."""
    printed, _ = _run_script(
        f"""
        dist.init_process_group("dynaxla")
        x = torch.ones(4, device="dynaxla")
        dist.all_reduce(x)
        if rank == {killed}:
            os.kill(os.getpid(), 9)
        def work():
            while True:
                dist.all_reduce(x)
                time.sleep(0.1)
        caught(work)
    """,
        size,
    )
    for left in (text for rank, text in enumerate(printed) if rank != killed):
        _assert_named(left, killed)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_vanishes_is_named(stopped: int) -> None:
    """A stopped process closes no connection and answers nothing, as a host without power; process 0 has the store."""
    printed, _ = _run_on_a_mesh(f"""
        import signal
        if rank == {stopped}:
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            subprocess.Popen(["sh", "-c", f"sleep 45; kill -9 {{os.getpid()}}"], **quiet)
            os.kill(os.getpid(), signal.SIGSTOP)
        caught(lambda: steps(lambda: steady(split).item(), 4000))
    """)
    _assert_named(printed[1 - stopped], stopped)


def _assert_named(left: str, killed: int) -> None:
    assert "RAISED ProcessLost" in left, left
    assert f"rank {killed} is lost" in left, left
    assert float(left.split("after ")[1].split(":")[0]) < 30


@pytest.mark.long
def test_who_survives_process_0_goes_on() -> None:
    """JAX's client ends nobody later either: a process that catches the error ends when it wants to."""
    printed, _ = _run_on_a_mesh("""
        if rank == 0:
            os.kill(os.getpid(), 9)
        try:
            steps(lambda: steady(split).item(), 4000)
        except ProcessLost as error:
            print("LOST", error.explanation, flush=True)
        time.sleep(15)
        print("ENDS", flush=True)
    """)
    assert "LOST rank 0 is lost" in printed[1], printed
    assert "ENDS" in printed[1], printed


def test_a_process_that_ends_is_not_waited_for() -> None:
    printed, seconds = _run_script("""
        dist.init_process_group("dynaxla")
        x = torch.ones(4, device="dynaxla")
        dist.all_reduce(x)
        if rank == 1:
            raise ValueError("a fault of the user's")
        caught(lambda: [dist.all_reduce(x) for _ in range(2)] and x.tolist())
    """)
    assert "rank 1 is lost" in printed[0], printed
    assert "a fault of the user's" in printed[1], printed
    assert seconds < 60


def test_other_programs_are_told() -> None:
    """At their first run, and later, whether they would wait for ever or exchange wrong numbers."""
    for body in (
        "work = lambda: dist.all_reduce(x[:3].clone()) if rank else dist.all_reduce(x)",
        "calls = iter(lambda: (dist.broadcast(x, 0) if rank else dist.all_reduce(x), time.sleep(0.005)), 1);"
        "work = lambda: [next(calls) for _ in range(4000)]",
        "graph = lambda v: funcol.all_reduce(v + 1, 'sum', group).exp() if rank else funcol.all_reduce(v, 'sum', group);"
        "work = lambda: torch.compile(graph, backend='dynaxla')(x).tolist()",
        "graph = torch.compile(lambda v: funcol.all_reduce(v, 'sum', group), backend='dynaxla', dynamic=True);"
        "calls = iter(lambda: (graph(torch.ones(5 + rank, device='dynaxla')), time.sleep(0.01)), 1);"  # of one bucket
        "work = lambda: [next(calls) for _ in range(4000)]",
    ):
        printed, _ = _run_script(f"""
            import torch.distributed._functional_collectives as funcol
            dist.init_process_group("dynaxla")
            group = dist.group.WORLD
            x = torch.ones(4, device="dynaxla")
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            {body}
            caught(work)
        """)
        assert all("RAISED" in text for text in printed), (body, printed)
        assert any("ProgramsDiffer" in text for text in printed), (body, printed)


def test_the_device_was_used_before() -> None:
    printed, _ = _run_script("caught(dynaxla.distributed.initialize)", size=1)
    assert "the device was chosen before the processes met" in printed[0], printed
    printed, _ = _run_script("""
        torch.ones(2, device="dynaxla").sum().item()
        caught(lambda: dist.init_process_group("dynaxla"))
    """)
    assert all("the device was used before the processes met" in text for text in printed), printed


@pytest.mark.plugin
def test_a_plugin_that_joins_no_processes() -> None:
    """It is given the job's coordination service, as jax.distributed gives it, and refuses the options."""
    body = """
        from importlib.metadata import files
        from dynaxla.errors import TargetError
        (library,) = [str(file.locate()) for file in files("lammps-jax-pjrt-cpu") if file.suffix == ".so"]
        dynaxla.distributed.initialize(timeout_s=60)
        try:
            dynaxla.use(library)
        except TargetError as error:
            print("REFUSED", error)
    """
    printed, _ = _run_script(body, size=1, start="")
    assert "REFUSED" in printed[0], printed
    assert "Unexpected option name" in printed[0], printed
    assert "by which it joins the job's processes" in printed[0], printed


_HEAD_OF_MESH = """
dynaxla.distributed.initialize(timeout_s=120)
dynaxla.use("cpu", devices=2)
mesh = dynaxla.make_mesh((2, 2), ("data", "model"))
torch.manual_seed(0)
x = torch.randn(8, 4)
split = dynaxla.shard(x, mesh, ("data",))
def make(function, **options):
    return torch.compile(function, backend="dynaxla", options=options)
def steps(run, count=400):
    for _ in range(count):
        run()
        time.sleep(0.02)
steady = make(lambda y: (y @ y.mT).sum())
steady(split).item()
"""


def _run_on_a_mesh(body: str) -> tuple[list[str], float]:
    return _run_script(body, start=_HEAD_OF_MESH)


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_process_of_a_mesh_is_named(killed: int) -> None:
    printed, _ = _run_on_a_mesh(f"""
        if rank == {killed}:
            os.kill(os.getpid(), 9)
        caught(lambda: steps(lambda: steady(split).item(), 4000))
    """)
    _assert_named(printed[1 - killed], killed)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (
            "other = make(lambda y: y.exp().sum() if rank else y.sum()); work = lambda: other(split).item()",
            "ProgramsDiffer",
        ),
        ("work = lambda: steps(lambda: split * (1.0 + rank))", "ValuesDiffer"),
        pytest.param(
            "work = lambda: split.tolist() if rank else steps(lambda: steady(split).item())",
            "ProgramsDiffer",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other = dynaxla.shard(torch.zeros(8, 4 + 2 * rank), mesh, ('data',)); work = lambda: steady(other).item()",
            "ValuesDiffer",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other = make(lambda y: (y @ y.mT).exp().sum(), matmul_precision=('default', 'highest')[rank]);"
            "work = lambda: other(split).item()",
            "ProgramsDiffer",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other = dynaxla.shard(x * (1 + rank), mesh, ('data',)); work = lambda: steps(lambda: steady(split).item())",
            "ValuesDiffer",
            marks=pytest.mark.long,
        ),
    ],
    ids=["graph", "number", "read by one", "sizes", "options", "weights"],
)
def test_what_differs_on_a_mesh_is_told(work: str, error: str) -> None:
    """Another graph, other values, sizes or options in one process, or a read that the others do not make: never a hang."""
    printed, _ = _run_on_a_mesh(f"""
        {work}
        caught(work)
    """)
    assert all("RAISED" in text for text in printed), printed
    assert any(f"RAISED {error}" in text for text in printed), printed
