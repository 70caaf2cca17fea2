"""Runs PyTorch's own tests of torch.distributed on the device and, for comparison, with gloo on the CPU.

    python -m conformance.distributed_suites [--tests DIR] [--files FILE ...] [-k REGEX] [--size N] [--sample N --seed S]
        [--limit SECONDS] [--log FILE] [--resume] [--table FILE]

`distributed_test.py` is part of torch's wheel; other files are of a checkout of PyTorch, whose folder test/ the user names.
Prints a table per file, and what contradicts the list of expected failures (`results/distributed_expected.tsv`), which makes
the exit code 1. Outcomes are appended to a log as they come; `--resume` runs only tests that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from conformance.distributed_worker import PASSES, SKIPPED, WHEEL, Team, load_helpers, serve
from conformance.upstream import choose
from conformance.upstream_table import (
    DISTRIBUTED,
    append_outcome,
    find_errors,
    read_expected,
    read_outcomes,
    write_outcomes,
    write_page,
    write_table,
)
from conformance.upstream_worker import DIED, NOT_RUN, SAME, SLOW, Outcome
from conformance.upstream_worker import SKIPPED as SKIPPED_ON_DEVICE

EXPECTED = Path(__file__).parent / "results" / "distributed_expected.tsv"
GROUPS = ("_tensor", "tensor/parallel", "_composable", "checkpoint", "fsdp", "algorithms", "_shard")
FILES = (
    "test_functional_api.py",
    "test_c10d_functional_native.py",
    "test_c10d_object_collectives.py",
    "test_device_mesh.py",
    "test_c10d_common.py",
    "test_collective_utils.py",
)
_STARTED_S, _GRACE_S = 180.0, 3.0


def list_files(tests: Path | None) -> list[str]:
    """The files of tests that are run: that of the wheel, and those below test/distributed of a checkout."""
    if tests is None:
        return [WHEEL]
    root = tests / "distributed"
    below = sorted(str(path.relative_to(root)) for group in GROUPS for path in (root / group).rglob("test_*.py"))
    return [WHEEL, *(file for file in FILES if (root / file).exists()), *below]


class Processes:
    """The processes of a team, which are started anew after a test that did not end alike in all of them."""

    def __init__(self, team: Team, file: str) -> None:
        self._team = team
        self._file = file
        self._started: list[tuple[Any, Connection]] = []
        self._context = mp.get_context("fork")

    def start(self) -> list[str] | str:
        """Starts them, if they are not running; returns the names of the tests, or why the file cannot be imported."""
        found: list[str] | str = []
        self._team.meeting.unlink(missing_ok=True)
        for rank in range(self._team.size):
            here, there = self._context.Pipe()
            process = self._context.Process(target=serve, args=(self._team, self._file, rank, there))
            process.start()
            there.close()
            self._started.append((process, here))
        for _, connection in self._started:
            try:
                found = connection.recv() if connection.poll(_STARTED_S) else f"import: over {_STARTED_S:g} s"
            except (EOFError, ConnectionResetError):
                found = "import: the process ended"
        return found

    def run(self, number: int, name: str, limit_s: float) -> tuple[str, str, float]:
        """The status, detail and seconds of a test: that of the first process in which it does not pass."""
        if not self._started:
            self.start()
        started, results, until = time.monotonic(), dict[int, tuple[str, str]](), time.monotonic() + limit_s
        for _, connection in self._started:
            with contextlib.suppress(OSError):
                connection.send((number, name))
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._started)}
        while waiting and time.monotonic() < until:
            for each in wait(list(waiting), timeout=max(0.0, until - time.monotonic())):
                try:
                    results[waiting.pop(each)] = each.recv()  # type: ignore[call-overload,union-attr,index]
                except (EOFError, ConnectionResetError):
                    results[len(results)] = DIED, "the process ended"
            if any(status not in (PASSES, SKIPPED) for status, _ in results.values()):
                until = min(until, time.monotonic() + _GRACE_S)
        seconds = round(time.monotonic() - started, 2)
        bad = [result for result in results.values() if result[0] not in (PASSES, SKIPPED)]
        if waiting or len({status for status, _ in results.values()}) > 1 or any(status == DIED for status, _ in bad):
            self.end()
        if bad or waiting:
            return (*(bad[0] if bad else (SLOW, f"over {limit_s:g} s")), seconds)
        return (*next((each for each in results.values() if each[0] == SKIPPED), (PASSES, "")), seconds)

    def end(self) -> None:
        """Kills the processes and those that they started."""
        for process, connection in self._started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            connection.close()
        self._started = []


def sweep_file(options: argparse.Namespace, file: str) -> list[str]:
    """Runs the tests of a file that the options ask for; returns the names of all its tests."""
    with tempfile.TemporaryDirectory() as folder:
        tests = None if options.tests is None else options.tests / "distributed"
        teams = [Processes(Team(device, options.size, Path(folder), tests), file) for device in ("cpu", "dynaxla")]
        try:
            names = teams[0].start()
            if isinstance(names, str):
                append_outcome(options.log, Outcome(file, "", NOT_RUN, names))
                return []
            done = {outcome.test for outcome in read_outcomes(options.log) if outcome.file == file}
            left = [name for name in choose(names, file, options) if name not in done]
            for outcome in _run(teams, file, left, options.limit):
                append_outcome(options.log, outcome)
        finally:
            for team in teams:
                team.end()
        return names


def _run(teams: Sequence[Processes], file: str, names: Sequence[str], limit_s: float) -> Iterator[Outcome]:
    host, device = teams
    for number, name in enumerate(names):
        status, detail, _ = host.run(number, name, limit_s)
        if status != PASSES:
            yield Outcome(file, name, NOT_RUN, f"with gloo: {status} {detail}")
            continue
        status, detail, seconds = device.run(number, name, limit_s)
        final = {PASSES: SAME, SKIPPED: SKIPPED_ON_DEVICE}.get(status, status)
        yield Outcome(file, name, final, detail, seconds)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tests", type=Path, help="folder test/ of a checkout of PyTorch; without it the wheel's file alone"
    )
    parser.add_argument("--files", nargs="+", help=f"{WHEEL}, or relative to distributed/ in that folder")
    parser.add_argument("-k", default="", help="tests whose class and name match")
    parser.add_argument("--size", type=int, default=2, help="processes")
    parser.add_argument("--sample", type=int, help="so many tests of each file, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a test on each device")
    parser.add_argument("--log", type=Path, default=Path("distributed_suites.jsonl"))
    parser.add_argument("--resume", action="store_true", help="go on with the log; else it is begun anew")
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    parser.add_argument("--table", type=Path, help="write the page there")
    options = parser.parse_args(arguments)
    options.tests = None if options.tests is None else options.tests.resolve()
    options.files = options.files or list_files(options.tests)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    load_helpers(options.size)
    begun = [outcome for outcome in read_outcomes(options.log) if outcome.test] if options.resume else []
    write_outcomes(options.log, begun)
    names = {}
    for file in options.files:
        names[file] = sweep_file(options, file)
        print(f"{file}: {len(names[file])} tests", flush=True)
    outcomes = [outcome for outcome in read_outcomes(options.log) if outcome.file in options.files]
    expected = read_expected(options.expected)
    totals = {file: len(found) for file, found in names.items()}
    print(write_table(outcomes, totals))
    if options.table is not None:
        how = (
            f"This table has {len(outcomes)} of {sum(totals.values())} tests, in {options.size} processes, with torch "
            f"{torch.__version__}."
        )
        if options.sample is not None:
            how += f" Of files with more than {options.sample} tests as many were drawn at random (`--seed {options.seed}`)."
        page = write_page(outcomes, totals, expected, options.limit, how, DISTRIBUTED)
        options.table.write_text(page, encoding="utf-8")
    errors = find_errors(outcomes, expected, names)
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
