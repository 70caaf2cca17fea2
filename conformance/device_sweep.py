"""Compares everything in torch's own databases of ops, modules and optimizers, run op by op on the device, with eager.

    python -m conformance.device_sweep [ops | writes | modules | optimizers] [--only REGEX] [--dtypes NAME ...] [--backward]
        [--samples N] [--ops-per-process N] [--list STATUS ...] [--bucketed] [--target TARGET] [--table FILE]

`ops` runs some samples of each op forward, or their gradients; `writes` has each op write to memory of other layouts.
`modules` runs all inputs of each module, with all gradients and buffers, in training and in evaluation. `optimizers`
runs all inputs of each optimizer in each kind of step that it has, with all states. Each runs in a forked process with
a time limit for each dtype; `--ops-per-process` gives one process several in turn. Prints the names of those that are
not right, and the counts: "right" on the device, right on the "host" (with the ops that ran there), "wrong", "raised",
"died", "timed out", and "not run" if eager accepts none of the samples. `--target` takes what `dynaxla.use` takes, such as
the file of a PJRT plugin; `--table` writes a line for each op and dtype, as in results/plugin_sweep.tsv.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map

import dynaxla
from conformance.device_buckets import all_bucketed
from conformance.device_modules import check_module
from conformance.device_optimizers import check_optimizer, optimizer_calls
from conformance.device_writes import check_writes
from conformance.opinfo_compare import difference, first_line
from conformance.opinfo_samples import Sample, name_of, run, seed, take_samples, why_not
from conformance.ops_sweep import load
from conformance.quiet import be_quiet
from dynaxla.device import registration

DTYPES = {
    "ops": ("float32", "int64", "bool"),
    "writes": ("float32", "int64"),
    "modules": ("float32", "float64"),
    "optimizers": ("float32",),
}
TAKE_HOST = ("tensor_split",)
"""Whose arguments behind the input torch wants on the host."""

Result = tuple[str, str]  # status, detail


@dataclass(frozen=True)
class Job:
    """What is checked in one go.

    Attributes:
        row: of the table.
        check: gives its status, with the detail.
    """

    name: str
    row: str
    check: Callable[[], Result]


def sweep(jobs: Sequence[Job], limit_s: float, target: str) -> Iterator[tuple[Job, Result]]:
    """What comes of jobs, in a process of their own; a job that ends it costs only itself."""
    done = 0
    while done < len(jobs):
        here, there = mp.Pipe(duplex=False)
        process = mp.get_context("fork").Process(target=_work, args=(jobs[done:], target, there))
        process.start()
        there.close()
        for job in jobs[done:]:
            done += 1
            result = _receive(here, limit_s)
            yield job, result
            if result[0] in ("died", "timed out"):
                break
        process.kill()
        process.join()
        here.close()


def _receive(connection: Connection, limit_s: float) -> Result:
    try:
        if connection.poll(limit_s):
            result: Result = connection.recv()
            return result
        return "timed out", f"{limit_s:.0f} s"
    except EOFError:
        return "died", "the process ended"


def _work(jobs: Sequence[Job], target: str, connection: Connection) -> None:
    be_quiet()
    registration.use(target)
    for job in jobs:
        try:
            result = job.check()
        except Exception as error:  # an op that cannot even be tried is a line, not the end of the sweep
            result = "raised", f"the sweep itself: {type(error).__name__}: {first_line(error)}"
        connection.send(result)
    connection.close()


def _check(info: Any, dtype: torch.dtype, count: int, backward: bool) -> Result:
    seed()
    samples = list(islice(take_samples(info, dtype, backward), count))
    if not samples:
        return "not run", "eager takes none of the samples"
    before = Counter(dynaxla.read_metrics().host_ops)
    # OpInfo seeds random ops inside of the op; two generators give other numbers anyway.
    with patch.object(torch.testing._internal.common_methods_invocations, "wrapper_set_seed", _call):
        problems = [problem for sample in samples if (problem := _problem(info, sample)) is not None]
    if problems:
        return min(problems, key=lambda problem: problem[0] != "wrong")
    hosted = Counter(dynaxla.read_metrics().host_ops) - before
    return ("host", " ".join(sorted(hosted))) if hosted else ("right", "")


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _problem(info: Any, sample: Sample) -> Result | None:
    seed()
    call = sample.call
    args = call.args if info.name in TAKE_HOST else _moved(call.args)
    moved = type(call)(_moved(call.input), args=args, kwargs=_moved(call.kwargs))
    moved.output_process_fn_grad = call.output_process_fn_grad
    there = Sample(moved, [], [cotangent.to("dynaxla") for cotangent in sample.cotangents], False)
    try:
        results = tree_map(_on_host, run(info.op, there))
    except Exception as error:  # the sweep's result
        return "raised", f"{type(error).__name__}: {first_line(error)}"
    told = difference(info, sample, results)
    return None if told is None else ("wrong", told)


def _moved(given: Any) -> Any:
    return tree_map(_on_device, given)


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved_with_storage(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("dynaxla")
    return value


def _moved_with_storage(value: torch.Tensor) -> torch.Tensor:
    """On the device; a part of a larger tensor goes along with that."""
    whole = 0 if value.layout is not torch.strided else value.untyped_storage().nbytes() // value.itemsize
    if value.numel() == whole or not whole or 0 in value.shape or value.is_conj() or value.is_neg():
        return value.to("dynaxla")
    everything = value.as_strided([whole], [1], 0).to("dynaxla")
    return everything.as_strided(value.shape, value.stride(), value.storage_offset())


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", nargs="?", choices=DTYPES, default="ops")
    parser.add_argument("--only", default="", help="what has a name that matches")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--backward", action="store_true", help="compare the gradients of the inputs")
    parser.add_argument("--samples", type=int, default=4, help="of each op and dtype")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for an op in one dtype")
    parser.add_argument("--ops-per-process", type=int, default=20)
    parser.add_argument(
        "--bucketed", action="store_true", help="every size of ops by themselves varies (device_buckets.py)"
    )
    parser.add_argument("--target", default="cpu", help="as `dynaxla.use` takes it")
    parser.add_argument("--table", type=Path, help="write a line for each op and dtype there")
    parser.add_argument("--list", nargs="+", default=["host", "wrong", "raised", "died", "timed out"])
    return parser.parse_args()


def op_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Each op in each dtype."""
    from torch.testing._internal.common_methods_invocations import op_db

    direction = "backward" if options.backward else "forward"
    for info in op_db:
        for name in options.dtypes:
            dtype = getattr(torch, name)
            if why_not(info, dtype, direction) is None:
                yield Job(name_of(info), name, partial(_check, info, dtype, options.samples, options.backward))


def write_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Each op that writes, in each dtype."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        for name in options.dtypes:
            dtype = getattr(torch, name)
            writes = info.inplace_variant is not None or info.supports_out
            if writes and why_not(info, dtype, "forward") is None and info.name not in TAKE_HOST:
                yield Job(name_of(info), name, partial(check_writes, info, dtype, 2 * options.samples))


def module_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Each module in training and in evaluation, in each dtype."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for name in options.dtypes:
            for training in (True, False):
                row = f"{name}, {'training' if training else 'evaluation'}"
                yield Job(info.name, row, partial(check_module, info, getattr(torch, name), training))


def optimizer_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Each optimizer with each of its inputs, in each of its ways."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for call in optimizer_calls(info):
            yield Job(call.name, call.way, partial(check_optimizer, call))


JOBS: Mapping[str, Callable[[argparse.Namespace], Iterator[Job]]] = {
    "ops": op_jobs,
    "writes": write_jobs,
    "modules": module_jobs,
    "optimizers": optimizer_jobs,
}


def main() -> None:
    options = parse()
    options.dtypes = options.dtypes or DTYPES[options.database]
    load()
    jobs = [job for job in JOBS[options.database](options) if re.search(options.only, job.name)]
    names = list(dict.fromkeys(job.name for job in jobs))
    counts: Counter[tuple[str, str]] = Counter()
    lines: list[str] = []
    started = time.monotonic()
    for start in range(0, len(names), options.ops_per_process):
        together = names[start : start + options.ops_per_process]
        with all_bucketed(options.bucketed):
            results = list(sweep([job for job in jobs if job.name in together], options.limit, options.target))
        for job, (status, detail) in results:
            counts[job.row, status] += 1
            lines.append(f"{job.name}\t{job.row}\t{status}\t{detail}\n")
            if status in options.list:
                print(f"{status}\t{job.name}\t{job.row}\t{detail}", flush=True)
    if options.table is not None:
        options.table.write_text("".join(sorted(lines)))
    for (row, status), count in sorted(counts.items()):
        print(f"{row}: {count} {status}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
