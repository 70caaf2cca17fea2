"""Reads and writes the results of the torch-mlir sweep: a line for each overload and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "mlir_sweep.tsv"

DIRECT, FORM, DECOMPOSED = "direct", "form", "decomposed"
"""The ways in which an op is offered: as it is, as its aten form, or through torch's decomposition."""


@dataclass(frozen=True)
class Line:
    """A line of the record: what came of offering an overload, in one way, in one dtype."""

    overload: str
    dtype: str
    way: str
    verdict: str
    calls: int
    right: int
    reason: str

    def __str__(self) -> str:
        return "\t".join(map(str, astuple(self)))

    @staticmethod
    def parse(text: str) -> Line:
        overload, dtype, way, verdict, calls, right, reason = text.split("\t")
        return Line(overload, dtype, way, verdict, int(calls), int(right), reason)


def in_way(lines: Sequence[Line], way: str) -> list[Line]:
    """Those of the lines that speak of one way."""
    return [line for line in lines if line.way == way]


def read(path: Path = RESULTS) -> dict[str, list[Line]]:
    """The record, by overload."""
    lines: dict[str, list[Line]] = defaultdict(list)
    if path.exists():
        for text in path.read_text().splitlines()[1:]:
            line = Line.parse(text)
            lines[line.overload].append(line)
    return lines


def write(lines: Mapping[str, Sequence[Line]], path: Path = RESULTS) -> None:
    header = "\t".join(Line.__dataclass_fields__)
    texts = [str(line) for name in sorted(lines) for line in lines[name]]
    path.write_text("\n".join([header, *texts]) + "\n")
