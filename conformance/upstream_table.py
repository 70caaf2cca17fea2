"""Judges the outcomes of PyTorch's device-generic tests by the list of expected failures, and writes docs/upstream.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from statistics import median

from conformance.upstream_worker import DIED, FAILS, NOT_RUN, SAME, SKIPPED, SLOW, Outcome

EXPECTED = Path(__file__).parent / "results" / "upstream_expected.tsv"
PAGE = Path(__file__).parents[1] / "docs" / "upstream.md"
UNLIKE_THE_CPU = (FAILS, SLOW, DIED)
_COLUMNS = (SAME, FAILS, SLOW, DIED, SKIPPED, NOT_RUN)
GENERIC = """\
# PyTorch's own device-generic tests

Written by `python -m conformance.upstream --tests DIR`. Do not edit.

PyTorch tests its devices by test files whose classes are made for each device (`instantiate_device_type_tests`). The
command runs {files} of them on the device "dynaxla" and on the CPU, from a checkout that the user names; none of their text
is in this project. Debian's source package `pytorch` of suite trixie has those of PyTorch 2.6:

    apt-get source --download-only pytorch   # with a deb-src line for trixie
    tar xJf pytorch_*.orig.tar.xz --wildcards '*/test/*'
    python -m conformance.upstream --tests pytorch-v2.6.0/test --jobs 2 --resume

`--sample N --seed S` takes N tests of each file at random, `--files` and `-k` a part. `--resume` runs those that neither the
log nor the record of outcomes has, `conformance/results/upstream_outcomes.tsv`, from which this page is written; `--retry`
those that failed there; `--record` adds the log to it. Workers run many tests each; one that dies or is slower than the limit
counts against its test. The command ends with exit code 1 if a test fails that `conformance/results/upstream_expected.tsv`
does not list, if one that is listed passes, or if one is listed that the file does not have. A line there lists a test, or by
a regular expression many; then all of these must fail.

"same": passes on the CPU and on the device. "slow": over {limit:g} s of CPU time, or waits longer than `--wall-limit`.
"died": the process ended. "skipped": passes on the CPU, and skips itself on other devices. "not run": does not pass on the
CPU with this version of torch (it is skipped there, or it fails), or is not made for the CPU. The rate is
same / (same + fails + slow + died).
"""
DISTRIBUTED = """\
# PyTorch's own tests of torch.distributed

Written by `python -m conformance.distributed_suites --tests DIR`. Do not edit.

The command runs {files} files of tests in several processes on the device "dynaxla", and with gloo on the CPU. The first is
part of torch's wheel (its tensors are put on the device by `torch.set_default_device`), the others are of a checkout that the
user names, with the device's name in CUDA's place; none of their text is in this project. Tests whose ranks are threads of one
process run with processes, too; those of one process are not run. [upstream.md](upstream.md) says where a checkout is found.

A team of processes runs many tests; it is started anew after one that does not end alike in all. The command ends with exit
code 1 if a test fails that `conformance/results/distributed_expected.tsv` does not list, or if one that is listed passes.

"same": passes with gloo and on the device. "slow": over {limit:g} s. "died": a process ended. "skipped": passes with gloo, and
skips itself on the device. "not run": does not pass with gloo with this version of torch and this number of processes. The
rate is same / (same + fails + slow + died).
"""


def read_outcomes(log: Path) -> list[Outcome]:
    """The latest outcome of each test in a log; none if there is no log. A last line that was cut off is left out."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]
    return list({(outcome.file, outcome.test): outcome for outcome in outcomes}.values())


def write_outcomes(log: Path, outcomes: Iterable[Outcome]) -> None:
    log.write_text("".join(map(_line, outcomes)), encoding="utf-8")


def append_outcome(log: Path, outcome: Outcome) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(_line(outcome))


def _line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome)) + "\n"


def read_expected(path: Path = EXPECTED) -> dict[tuple[str, str], str]:
    """The reasons of tests that fail on the device, by file and by the regular expression that matches their names."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = (line.split("\t") for line in lines)
    return {(file, tests): reason for file, tests, reason in rows}


def _find_line(file: str, test: str, expected: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The line of the list that has the test; None if it is not listed."""
    return next((line for line in expected if line[0] == file and re.fullmatch(line[1], test)), None)


def find_errors(
    outcomes: Iterable[Outcome], expected: Mapping[tuple[str, str], str], names: Mapping[str, Sequence[str]]
) -> list[str]:
    """What contradicts the list of expected failures. `names` has the tests of each file that was imported."""
    errors = []
    for outcome in outcomes:
        listed = _find_line(outcome.file, outcome.test, expected) is not None
        if outcome.status == SAME and listed:
            errors.append(f"passes though listed: {outcome.file} {outcome.test}")
        elif (outcome.status in (FAILS, DIED) or not outcome.test) and not listed:
            errors.append(f"{outcome.status}, not listed: {outcome.file} {outcome.test}: {outcome.detail}")
    for file, tests in expected:
        if tests and file in names and not any(re.fullmatch(tests, name) for name in names[file]):
            errors.append(f"listed, but there is no such test: {file} {tests}")
    return errors


def write_table(outcomes: Sequence[Outcome], totals: Mapping[str, int]) -> str:
    """The table of counts per file. `totals`: how many tests each file has for the device."""
    heading = ("file", "tests", "tried", *_COLUMNS, "rate", "median s")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    lines += [_row(file, total, [o for o in outcomes if o.file == file]) for file, total in totals.items()]
    return "\n".join([*lines, _row("all", sum(totals.values()), outcomes)])


def _row(name: str, total: int, outcomes: Sequence[Outcome]) -> str:
    imported = [outcome for outcome in outcomes if outcome.test]
    counts = Counter(outcome.status for outcome in imported)
    run = sum(counts[status] for status in (SAME, *UNLIKE_THE_CPU))
    rate = f"{100 * counts[SAME] / run:.1f}%" if run else ""
    seconds = [outcome.seconds for outcome in imported if outcome.status in (SAME, FAILS, SLOW)]
    middle = f"{median(seconds):.1f}" if seconds else ""
    cells = (name, total, len(imported), *(counts[status] for status in _COLUMNS), rate, middle)
    return f"| {' | '.join(map(str, cells))} |"


def write_page(
    outcomes: Sequence[Outcome],
    totals: Mapping[str, int],
    expected: Mapping[tuple[str, str], str],
    limit_s: float,
    how: str,
    introduction: str = GENERIC,
    drawn: Sequence[Outcome] | None = None,
) -> str:
    """The whole text of a page. `how`: which tests were taken. `drawn`: the outcomes of those drawn at random; None: all."""
    parts = [introduction.format(files=len(totals), limit=limit_s), how, "", write_table(outcomes, totals), ""]
    parts += [*_tell_weighted_rate(outcomes if drawn is None else drawn, totals)]
    return "\n".join([*parts, *_reasons(outcomes, expected), *_slow(outcomes)]) + "\n"


def _tell_weighted_rate(drawn: Sequence[Outcome], totals: Mapping[str, int]) -> Iterator[str]:
    """What the rate of all tests would be if those of each file that were not drawn come out as those that were, and the
    standard error of that: of a file's rate p in n tests sqrt(p * (1 - p) / n), 0 where all were tried."""
    same, run, variance = 0.0, 0.0, 0.0
    for file, total in totals.items():
        statuses = [outcome.status for outcome in drawn if outcome.file == file and outcome.test]
        tests_each = total / max(len(statuses), 1)
        passing, counted = statuses.count(SAME), sum(status in (SAME, *UNLIKE_THE_CPU) for status in statuses)
        same += tests_each * passing
        run += tests_each * counted
        if counted and len(statuses) < total:
            variance += tests_each**2 * passing * (1 - passing / counted)
    if run:
        error = f" (standard error {100 * sqrt(variance) / run:.1f}%)" if variance else ""
        yield from (f"With each file counted by how many tests it has, the rate is {100 * same / run:.1f}%{error}.", "")


def _reasons(outcomes: Sequence[Outcome], expected: Mapping[tuple[str, str], str]) -> Iterator[str]:
    failing = [(o.file, o.test) for o in outcomes if o.status in (FAILS, DIED) or not o.test]
    lines = [_find_line(file, test, expected) for file, test in failing]
    counts = Counter("not explained" if line is None else expected[line] for line in lines)
    if counts:
        yield from ("## Why tests fail", "", "| tests | reason |", "|---|---|")
        yield from (f"| {count} | {reason} |" for reason, count in counts.most_common())
        most, passing = counts.most_common(1)[0][1], sum(outcome.status == SAME for outcome in outcomes)
        left = sum(outcome.status in (SAME, *UNLIKE_THE_CPU) for outcome in outcomes) - most
        yield from (
            "",
            f"Without the {most} tests of the first line the rate is {100 * passing / max(left, 1):.1f}%.",
            "",
        )


def _slow(outcomes: Sequence[Outcome]) -> Iterator[str]:
    slow = [outcome for outcome in outcomes if outcome.status == SLOW]
    if slow:
        yield from ("## Slower than the limit", "")
        yield from (
            "Ops outside of compiled graphs run one by one, and each is a program for its sizes and dtypes.",
            "",
        )
        yield from (f"- {outcome.file} {outcome.test}" for outcome in slow)
