"""One run of a benchmark, from the command line to its record: progress, tables, files, exit status."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dynaxla.bench.answers import Check
from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.cases import Case
from dynaxla.bench.html_report import write_report_page
from dynaxla.bench.measure import TimingSettings, measure_case
from dynaxla.bench.model_cases import ModelRequest
from dynaxla.bench.records import BackendResult, BenchRecord, CaseResult
from dynaxla.bench.result_tables import describe_run, make_console, print_case
from dynaxla.bench.start_process import measure_start
from dynaxla.errors import ExecutionError


class BenchSession:
    """Measures cases, prints each as it is ready, and at the end writes what the command line asks for. A context manager.

    Args:
        given: what `add_run_arguments` reads.
        cases: how many there will be.

    Attributes:
        status: the exit status once it has ended: 1 if a backend failed or gave other results.
    """

    def __init__(self, given: argparse.Namespace, cases: int) -> None:
        self._given, self._count = given, cases
        self._settings = TimingSettings(seconds=given.seconds, rounds=given.rounds)
        self._console = make_console()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._bar = self._progress.add_task("", total=cases)
        self._cases: list[CaseResult] = []
        self.status = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if not self._cases:
            return
        record = BenchRecord.collect(sys.argv[1:], self._cases)  # also of the cases before an error or Ctrl-C
        self.status = int(record.is_bad)
        self._console.print(describe_run(record), style="dim", markup=False)
        if self._given.json is not None:
            record.write(self._given.json)
        if self._given.html is not None:
            write_report_page(record, self._given.html)

    def measure(self, case: Case, **settings: float) -> CaseResult:
        """Measures a case in this process.

        Args:
            settings: those of `TimingSettings` that are other than the command line's.
        """
        chosen = dataclasses.replace(self._settings, **settings)  # type: ignore[arg-type]
        return self.add(measure_case(case, chosen, lambda share, what: self._tell(case.name, share, what)))

    def measure_model(
        self, request: ModelRequest, backends: Sequence[BenchBackend], *, starts: bool = True, captures: bool = False
    ) -> CaseResult:
        """Measures a model: its first passes in processes of their own, then the rest here.

        Args:
            starts: whether to measure the first passes.
            captures: also in a process that finds Dynamo's captures.
        """
        case = request.make_case(backends, backends[0].text)
        result = measure_case(case, self._settings, lambda share, what: self._tell(case.name, share / 2, what))
        if starts:
            results = []
            for place, each in enumerate(result.results):
                self._tell(case.name, 0.5 + 0.5 * place / len(backends), f"starts of {each.name}")
                results.append(each if each.check.is_bad else add_starts(each, request, captures=captures))
            result = dataclasses.replace(result, results=results)
        return self.add(result)

    def add(self, result: CaseResult) -> CaseResult:
        """Prints a case, and keeps it for the record."""
        self._cases.append(result)
        print_case(result, self._console)
        self._progress.update(self._bar, completed=len(self._cases), description="")
        return result

    def _tell(self, name: str, share: float, what: str) -> None:
        self._progress.update(self._bar, completed=len(self._cases) + share, description=f"{name}: {what}")


def add_starts(
    result: BackendResult, request: ModelRequest, *, captures: bool = False, again: int = 1
) -> BackendResult:
    """The result with the times of starts: a process with empty caches, and those that find what it stored."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in ("first", "second"):
                found[name] = measure_start(request.to_text(), result.name, Path(folder), again=again)
            if captures and result.name != "eager":
                measure_start(request.to_text(), result.name, Path(folder), captures="save")
                found["captures"] = measure_start(request.to_text(), result.name, Path(folder), captures="load")
        except ExecutionError as error:
            return dataclasses.replace(result, check=Check("failed", message=error.explanation))
    return dataclasses.replace(result, **found)


def run_cases(
    description: str | None,
    make_cases: Callable[[argparse.Namespace], Iterable[Case]],
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    **settings: float,
) -> None:
    """The command line of a benchmark that measures cases of its own; ends the process with its status.

    Args:
        description: the module's docstring.
        make_cases: makes the cases of what was parsed.
        add_arguments: adds arguments of its own.
        settings: those of `TimingSettings` that are other than the command line's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_run_arguments(parser)
    given = parser.parse_args()
    cases = list(make_cases(given))
    with BenchSession(given, len(cases)) as session:
        for case in cases:
            session.measure(case, **settings)
    sys.exit(session.status)
