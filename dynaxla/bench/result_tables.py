"""A record as tables for a terminal: one line for each backend of a case. `COLUMNS` is what the page has, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynaxla.bench.records import BackendResult, BenchRecord, CaseResult, StartTimes
from dynaxla.bench.sample_statistics import find_speedup, padded_ratio, quantile, spread_of

FILE_WIDTH = 180
Cell = Callable[[CaseResult, BackendResult], str]


def _of_samples(share: float) -> Cell:
    return lambda case, result: write_number(1e3 * quantile(result.samples_s, share)) if result.samples_s else ""


def _speedup(case: CaseResult, result: BackendResult) -> str:
    found = find_speedup(case, result)
    return "" if found is None or result.name == case.baseline else f"{found.median:.2f}"


def _quartiles(case: CaseResult, result: BackendResult) -> str:
    found = find_speedup(case, result)
    return "" if found is None or result.name == case.baseline else f"{found.low:.2f} - {found.high:.2f}"


def _rate(case: CaseResult, result: BackendResult) -> str:
    if not case.items or not result.samples_s:
        return ""
    return f"{write_number(case.items / spread_of(result.samples_s).median)} {case.unit}/s"


def _of_start(name: str, read: Callable[[StartTimes], str]) -> Cell:
    return lambda case, result: "" if (start := getattr(result, name)) is None else read(start)


def _check(case: CaseResult, result: BackendResult) -> str:
    if result.name == case.baseline:
        return "baseline"
    error = f" ({result.check.error:.0e})" if result.check.status == "same" and result.check.error else ""
    return result.check.status.upper() if result.check.is_bad else result.check.status + error


def _padded(case: CaseResult, result: BackendResult) -> str:
    ratio = padded_ratio(result)
    return "" if ratio is None or not sum(result.programs) else f"{ratio:.2f}"


def _nonzero(count: float, text: str) -> str:
    return text if count else ""


def _added(start: StartTimes) -> int:
    """Bytes that the pass, and those behind it, took at most beyond what was there."""
    return max(0, start.peak_bytes - start.before_bytes)


COLUMNS: Mapping[str, Cell] = {
    "check": _check,
    "median, ms": _of_samples(0.5),
    "p95, ms": lambda case, result: _of_samples(0.95)(case, result) if len(case.inputs) > 1 else "",
    "p99, ms": lambda case, result: _of_samples(0.99)(case, result) if len(case.inputs) > 1 else "",
    "rate": _rate,
    "speed-up": _speedup,
    "quartiles": _quartiles,
    "first, s": _of_start("first", lambda start: write_number(start.seconds)),
    "second, s": _of_start("second", lambda start: write_number(start.seconds)),
    "captures found, s": _of_start("captures", lambda start: write_number(start.seconds)),
    "programs": lambda case, result: _nonzero(sum(result.programs), str(sum(result.programs))),
    "recompiles": lambda case, result: str(result.recompiles) if result.samples_s and result.first else "",
    "padded": _padded,
    "peak, MB": _of_start("first", lambda start: _nonzero(start.peak_bytes, f"{start.peak_bytes / 1e6:.0f}")),
    "of the pass": _of_start("first", lambda start: _nonzero(start.peak_bytes, f"{_added(start) / 1e6:.0f}")),
}
"""Of each its heading, and what it says of a backend; an empty text where there is nothing to say."""


def write_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def make_rows(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a case, without columns that are empty; facts stand behind the rest."""
    facts = list(dict.fromkeys(name for result in case.results for name in result.facts))
    cells = {name: [cell(case, result) for result in case.results] for name, cell in COLUMNS.items()}
    cells |= {name: [_fact(result, name) for result in case.results] for name in facts}
    shown = {"backend": [result.name for result in case.results], **{n: c for n, c in cells.items() if any(c)}}
    if not any(result.samples_s or result.first_pass_s or result.first for result in case.results):
        shown.pop("check", None)  # nothing ran: facts alone
    return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]


def _fact(result: BackendResult, name: str) -> str:
    return write_number(result.facts[name]) if name in result.facts else ""


def make_console() -> Console:
    """The terminal; a file gets long lines."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def describe_run(record: BenchRecord) -> str:
    """The machine and the versions, in a line."""
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    about = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}"
    return f"{about}; {versions}" + (f"; commit {record.commit}" if record.commit else "")


def print_case(case: CaseResult, console: Console) -> None:
    headings, rows = make_rows(case)
    title = f"{case.name}: {case.about}" if case.about else case.name
    console.print(Text(title, style="bold"))  # a table's own title is cut to the table's width
    table = Table()
    for heading in headings:
        is_text = heading in ("backend", "check")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row, result in zip(rows, case.results, strict=True):
        table.add_row(*map(Text, row), style="red" if result.check.is_bad else None)
    console.print(table)
    for result in case.results:
        if result.check.is_bad:
            console.print(f"{case.name}, {result.name}: {result.check.message}", style="red", markup=False)


def list_differences(first: Mapping[str, Any], second: Mapping[str, Any], *, without: Sequence[str] = ()) -> list[str]:
    """A line for each value that two mappings do not share."""
    names = [name for name in dict.fromkeys([*first, *second]) if name not in without]
    return [f"{name}: {first.get(name)} -> {second.get(name)}" for name in names if first.get(name) != second.get(name)]
