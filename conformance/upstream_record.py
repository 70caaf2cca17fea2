"""Reads and writes the record of PyTorch's device-generic tests: the latest outcome of each, in `results/`.

Tests that differ in what follows the device's name, their dtypes, and had the same outcome share a line. Below the heading
`# file class` come lines such as

    0 test_add<TAB>0.1 f32 f64; 12 i64
    2 broadcast<TAB>0.4 c64<TAB>fails<TAB>AssertionError: Scalars are not equal!

The first is of `test_add_dynaxla_float32`, `.._float64` and `.._int64`, which are the same as on the CPU; the second of
`test_add_broadcast_dynaxla_complex64`: a name begins with so many words of the line before. Seconds are rounded, to a
tenth below two and to a whole number above, and are in front of the dtypes; "-" stands for no dtype. Long details are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from conformance.upstream_worker import DEVICE, FAILS, SAME, Outcome

RECORD = Path(__file__).parent / "results" / "upstream_outcomes.tsv"
_SHORT = {
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"c{bits}" for bits in (32, 64, 128)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",
    "bool": "b",
}
_LONG = {short: long for long, short in _SHORT.items()}
_NO_REST = "-"
_DETAIL_OF_FAILURES, _DETAIL = 160, 60


def join_outcomes(*logs: Iterable[Outcome]) -> list[Outcome]:
    """The outcome of each test in the last of the logs that has it."""
    return list({(outcome.file, outcome.test): outcome for log in logs for outcome in log}.values())


def write_record(outcomes: Iterable[Outcome], path: Path = RECORD) -> None:
    """Writes outcomes of tests, sorted by file and class; an outcome of a file as a whole is left out.

    Raises:
        ValueError: a test's name does not have the device, or has short names of dtypes behind it.
    """
    classes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.test:
            classes[outcome.file, outcome.test.partition(".")[0]].append(outcome)
    lines = []
    for heading in sorted(classes):
        lines += [f"# {' '.join(heading)}", *_write_class(classes[heading])]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _write_class(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines below the heading of a class."""
    alike: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        start, device, rest = outcome.test.partition(".")[2].partition(f"_{DEVICE}")
        if not device:
            raise ValueError(f"{outcome.test} does not name the device")
        detail = " ".join(outcome.detail.split())[: _DETAIL_OF_FAILURES if outcome.status == FAILS else _DETAIL].strip()
        status = "" if (outcome.status, detail) == (SAME, "") else outcome.status
        alike[start, status, detail][_round(outcome.seconds)].append(_shorten(rest))
    before: list[str] = []
    for (start, status, detail), by_seconds in sorted(alike.items()):
        words = start.split("_")
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, words, strict=False))))
        cells = [f"{shared} {'_'.join(words[shared:])}"]
        cells.append("; ".join(" ".join([seconds, *sorted(rests)]) for seconds, rests in sorted(by_seconds.items())))
        yield "\t".join([*cells, status, detail] if status else cells)
        before = words


def _round(seconds: float) -> str:
    return f"{round(seconds, 1 if seconds < 2 else 0):g}"


def _shorten(rest: str) -> str:
    """The rest of a test's name, "" or "_" and words, as `_lengthen` takes it."""
    words = rest.split("_")
    if words[0] or any(word in _LONG for word in words):
        raise ValueError(f"the record cannot have names that end in {rest!r}")
    return "_".join(_SHORT.get(word, word) for word in words[1:]) or _NO_REST


def _lengthen(rest: str) -> str:
    return "" if rest == _NO_REST else "".join(f"_{_LONG.get(word, word)}" for word in rest.split("_"))


def read_record(path: Path = RECORD) -> list[Outcome]:
    """The outcomes of a record, with rounded seconds and cut details; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcomes, file, name, words = list[Outcome](), "", "", list[str]()
    for line in lines:
        if line.startswith("# "):
            (_, file, name), words = line.split(" "), []
            continue
        start, by_seconds, *unlike = line.split("\t")
        shared, _, new = start.partition(" ")
        words = words[: int(shared)] + (new.split("_") if new else [])
        outcomes += _read_line(file, f"{name}.{'_'.join(words)}_{DEVICE}", by_seconds, unlike or [SAME, ""])
    return outcomes


def _read_line(file: str, start: str, by_seconds: str, unlike: Sequence[str]) -> Iterator[Outcome]:
    for group in by_seconds.split("; "):
        seconds, *rests = group.split(" ")
        for rest in rests:
            yield Outcome(file, start + _lengthen(rest), *unlike, float(seconds))
