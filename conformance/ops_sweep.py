"""Compares every op of torch's OpInfo database, run through torch.compile(backend="dynaxla"), with eager.

    python -m conformance.ops_sweep [--only REGEX] [--dtypes NAME ...] [--directions forward backward]
        [--samples N] [--device DEVICE] [--missing] [--again STATUS ...] [--ops-per-process N] [--out FILE]

Each op runs in a forked process of its own, with a time limit for each dtype and direction. `--ops-per-process` gives
one process several ops in turn, which is faster: a crash costs only the op that ran, and the next ops get another
process. The results replace the ops' lines in `results/ops_sweep.tsv`, from which docs/ops.md is written.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing as mp
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from conformance.opinfo_check import check
from conformance.opinfo_samples import name_of, why_not
from conformance.sweep_record import RESULTS, Record, Status, read_records, write_records

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool", "complex64")
DIRECTIONS = ("forward", "backward")
Job = tuple[str, str, str]  # an OpInfo's name, dtype, direction


def sweep(jobs: list[Job], samples: int, limit_s: float, device: str = "cpu") -> Iterator[Record]:
    """The records of jobs, from a process of their own; a job that ends it costs only itself."""
    done, start = 0, "fork" if device == "cpu" else "spawn"  # a GPU's context does not outlive a fork
    while done < len(jobs):
        here, there = mp.Pipe(duplex=False)
        process = mp.get_context(start).Process(target=_work, args=(jobs[done:], samples, device, there))
        process.start()
        there.close()
        for job in jobs[done:]:
            done += 1
            record = _receive(here, job, limit_s)
            yield record
            if record.status in (Status.DIED.value, Status.TIMED_OUT.value):
                break
        process.kill()
        process.join()
        here.close()


def _receive(connection: Connection, job: Job, limit_s: float) -> Record:
    name, dtype, direction = job
    try:
        if connection.poll(limit_s):
            record: Record = connection.recv()
            return record
        status, detail = Status.TIMED_OUT, f"{limit_s:.0f} s"
    except EOFError:
        status, detail = Status.DIED, "the process ended"
    return Record(name, dtype, direction, status.value, detail=detail)


def _work(jobs: list[Job], samples: int, device: str, connection: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    logging.disable()
    warnings.simplefilter("ignore")
    infos = op_infos()
    for name, dtype, direction in jobs:
        try:
            record = check(infos[name], getattr(torch, dtype), direction, samples, device)
        except Exception as error:  # an op that cannot even be tried is a line of the results, not the end of the sweep
            detail = f"the sweep itself: {type(error).__name__}: {error}"[:300]
            record = Record(name, dtype, direction, Status.RAISED.value, detail=detail)
        connection.send(record)
    connection.close()


def wanted_jobs(options: argparse.Namespace, known: dict[tuple[str, str, str], Record]) -> list[list[Job]]:
    """For every op the jobs that the options ask for; ops and dtypes that OpInfo has no samples of are left out."""
    found = []
    for name, info in op_infos().items():
        if re.search(options.only, name):
            jobs = [(name, dtype, direction) for direction in options.directions for dtype in options.dtypes]
            found.append([job for job in jobs if _is_wanted(info, job, options, known)])
    return [jobs for jobs in found if jobs]


@cache
def op_infos() -> Mapping[str, Any]:
    """The ops of torch's database, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(info): info for info in op_db}


def _is_wanted(info: Any, job: Job, options: argparse.Namespace, known: dict[tuple[str, str, str], Record]) -> bool:
    _, dtype, direction = job
    if why_not(info, getattr(torch, dtype), direction) is not None:
        return False
    record = known.get(job)
    if record is None:
        return not options.again
    return record.status in options.again if options.again else not options.missing


def load() -> None:
    """Imports what every process needs before any is forked, none of which starts a thread."""
    import jax  # noqa: F401

    import dynaxla.backend  # noqa: F401
    from dynaxla.lowering import torch_mlir_importer

    torch_mlir_importer.load()
    torch.set_num_threads(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops whose name matches")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--samples", type=int, default=4, help="of each op, dtype and direction")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for an op in one dtype and direction")
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu or cuda")
    parser.add_argument("--missing", action="store_true", help="only what the results lack")
    again = [status.value for status in Status]
    parser.add_argument("--again", nargs="+", default=[], choices=again, help="only what the results have so")
    parser.add_argument("--ops-per-process", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    records = read_records(options.out)
    load()
    jobs = wanted_jobs(options, records)
    print(f"{len(jobs)} ops, {sum(map(len, jobs))} lines", flush=True)
    counts: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # failures that the user's cache remembers are none of the sweep's
        for start in range(0, len(jobs), options.ops_per_process):
            together = list(chain.from_iterable(jobs[start : start + options.ops_per_process]))
            for record in sweep(together, options.samples, options.limit, options.device):
                records[record.key] = record
                counts[record.dtype, record.direction, record.status] += 1
                if record.status != Status.CORRECT.value:
                    print(record.line(), flush=True)
            write_records(records.values(), options.out)
    for (dtype, direction, status), count in sorted(counts.items()):
        print(f"{dtype} {direction}: {count} {status}")


if __name__ == "__main__":
    main()
