"""The first pass of one backend in a process of its own: with empty caches, and in a process that finds what others stored.

The clock starts when libraries, model and compilers are loaded; what a backend does once per process is measured apart, on a
layer of four weights. `python -m dynaxla.bench.start_process` is the child.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from dynaxla.bench.records import StartTimes
from dynaxla.errors import ExecutionError
from dynaxla.isolation.disk import CACHE_VARIABLE

Captures = Literal["none", "save", "load"]
"""Whether Dynamo keeps its captures: it does not; it does, and stores them at the end; it does, and finds some."""

MARK = "start times: "
"""Stands in front of the result, as a model's own code may print."""


def measure_start(
    request: str, backend: str, caches: Path, *, again: int = 0, captures: Captures = "none"
) -> StartTimes:
    """Measures a first pass in a new process.

    Args:
        request: a `ModelRequest` as text.
        backend: as on the command line.
        caches: the folder of the caches of dynaxla and torch: empty for a cold start.
        again: later passes.
        captures: what Dynamo does with its captures.

    Raises:
        ExecutionError: the process failed; the message has the end of what it printed.
    """
    environ = {**os.environ, CACHE_VARIABLE: str(caches / "own"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not set it, and each process would compile all sources
    if captures != "none":
        environ["TORCH_CACHING_PRECOMPILE"] = "1"
    command = [sys.executable, "-m", "dynaxla.bench.start_process", request, backend, str(again), captures]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise ExecutionError(f"{backend} failed in a process of its own: {done.stderr[-3000:]}")
    return StartTimes(**json.loads(lines[-1].removeprefix(MARK)))


def _run_here(request: str, name: str, again: int, captures: Captures) -> StartTimes:
    import torch

    from dynaxla.bench.backends import BenchBackend
    from dynaxla.bench.compile_counters import CompileCounters
    from dynaxla.bench.model_cases import ModelRequest
    from dynaxla.bench.workloads import Workload
    from dynaxla.torch_api.dynamo import lift_capture_limits

    asked, backend = ModelRequest.from_text(request), BenchBackend.parse(name)
    once = BenchBackend.parse(name) if backend.name != "dynaxla" else BenchBackend.parse("dynaxla:cache=false")
    layer = Workload("a layer", torch.nn.Linear(2, 2), [((torch.ones(2, 2),), {})])
    workload = asked.load()
    begin_s = _time(lambda: once.prepare(layer, train=False)(0))
    with lift_capture_limits():
        run = backend.prepare(workload, train=asked.train)

        def run_all() -> None:
            for number in range(len(workload.calls)):
                run(number)

        (before_bytes, _), before, computed = _read_memory(), CompileCounters.read(), time.process_time()
        seconds = _time(run_all)
        moved, computed = CompileCounters.read() - before, time.process_time() - computed
        again_s = [_time(run_all) for _ in range(again)]
    if captures == "save":
        torch.compiler.save_cache_artifacts()
    return StartTimes(
        seconds,
        moved.split(seconds),
        moved.compiled,
        moved.loaded,
        moved.graphs,
        cpu_s=computed,
        begin_s=begin_s,
        again_s=again_s,
        before_bytes=before_bytes,
        peak_bytes=_read_memory()[1],
        own_process=True,
    )


def _read_memory() -> tuple[int, int]:
    """Bytes that this process has resident, and the most that it ever had; zeros where the system is not Linux.

    The system's own count of a process, `ru_maxrss`, begins with that of the process that started it.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(sizes["VmRSS"].split()[0]) * 1024, int(sizes["VmHWM"].split()[0]) * 1024


def _time(run: object) -> float:
    assert callable(run)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Prints the start times as JSON, behind `MARK`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request")
    parser.add_argument("backend")
    parser.add_argument("again", type=int)
    parser.add_argument("captures", choices=("none", "save", "load"))
    given = parser.parse_args()
    made = _run_here(given.request, given.backend, given.again, given.captures)
    print(MARK + json.dumps(dataclasses.asdict(made)), flush=True)


if __name__ == "__main__":
    main()
