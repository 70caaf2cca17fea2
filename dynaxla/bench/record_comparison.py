"""Two records of the same cases, before and after a change: which backends became slower, beyond the noise of the rounds.

What is compared is the speed-up against the baseline, of which the rounds of both records give a median and quartiles: absolute
times differ between days by more than most changes. The baseline itself, and cases without one, are compared by their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynaxla.bench.records import BackendResult, BenchRecord, CaseResult
from dynaxla.bench.result_tables import list_differences, make_console, write_number
from dynaxla.bench.sample_statistics import Spread, find_speedup, spread_of
from dynaxla.errors import OptionError

LEAST_CHANGE = 0.05
"""Changes below it are noise, whatever the quartiles say."""

Verdict = Literal["faster", "slower", "same", "wrong", "right", "only in one"]


@dataclass(frozen=True, slots=True)
class Change:
    """A backend of a case in both records.

    Attributes:
        before, after: speed-ups, or for the baseline milliseconds of a run; None where it was not timed.
        factor: how many times as fast it is after; 0 where it was not timed in both.
    """

    case: str
    backend: str
    before: Spread | None
    after: Spread | None
    factor: float
    verdict: Verdict
    is_baseline: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether it is worse; a baseline's time is the machine's."""
        return self.verdict == "wrong" or (self.verdict == "slower" and not self.is_baseline)


def compare_records(before: BenchRecord, after: BenchRecord) -> list[Change]:
    """The changes, in the order of the second record.

    Raises:
        OptionError: no backend of a case is in both.
    """
    known = {case.name: case for case in before.cases}
    changes = [change for case in after.cases for change in _changes(known.get(case.name), case)]
    if all(change.verdict == "only in one" for change in changes):
        named = ", ".join(known) or "none"
        raise OptionError("the records have no case and backend in common", f"cases of the first: {named}")
    return changes


def _changes(before: CaseResult | None, after: CaseResult) -> Iterator[Change]:
    for result in after.results:
        old = None if before is None else before.of(result.name)
        if before is None or old is None:
            yield Change(after.name, result.name, None, None, 0.0, "only in one")
        else:
            yield _change(before, old, after, result)


def _change(before: CaseResult, old: BackendResult, after: CaseResult, new: BackendResult) -> Change:
    is_baseline = new.name == after.baseline or before.baseline != after.baseline
    was, now = (
        (_milliseconds(old), _milliseconds(new))
        if is_baseline
        else (find_speedup(before, old), find_speedup(after, new))
    )
    factor = 0.0
    if new.check.is_bad:
        verdict: Verdict = "wrong"
    elif old.check.is_bad:
        verdict = "right"
    elif was is None or now is None:
        verdict = "only in one"
    else:
        factor = was.median / now.median if is_baseline else now.median / was.median
        is_noise = was.overlaps(now) or abs(factor - 1) < LEAST_CHANGE
        verdict = "same" if is_noise else "faster" if factor > 1 else "slower"
    return Change(after.name, new.name, was, now, factor, verdict, is_baseline)


def _milliseconds(result: BackendResult) -> Spread | None:
    return spread_of([1e3 * each for each in result.samples_s]) if result.samples_s else None


def _write(value: Spread | None) -> str:
    numbers = [] if value is None else [write_number(each) for each in (value.median, value.low, value.high)]
    return "{} ({} - {})".format(*numbers) if numbers else ""


def print_comparison(before: BenchRecord, after: BenchRecord, console: Console | None = None) -> bool:
    """Prints the changes, and how machines and versions differ; whether no backend became slower or wrong."""
    console = console or make_console()
    changes = compare_records(before, after)
    table = Table("case", "backend", "before", "after", "change", "verdict", title="speed-up, or ms of the baseline")
    for each in changes:
        cells = [_write(each.before), _write(each.after)]
        change = f"{each.factor:.2f}x" if each.factor else ""
        style = "red" if each.is_bad else "green" if each.verdict in ("faster", "right") else None
        table.add_row(Text(each.case), Text(each.backend), *cells, change, each.verdict, style=style)
    console.print(table)
    for line in list_differences(
        {**before.versions, "commit": before.commit}, {**after.versions, "commit": after.commit}
    ):
        console.print(line, style="dim", markup=False)
    for line in list_differences(before.machine, after.machine, without=("load",)):
        console.print(f"another machine: {line}", style="yellow", markup=False)
    return not any(each.is_bad for each in changes)
