"""Reads and writes the op sweep's results: one line for each op, dtype and direction, in `results/ops_sweep.tsv`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from enum import Enum
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "ops_sweep.tsv"


class Status(Enum):
    """How the compiled calls of an op compare with eager's."""

    CORRECT = "correct"
    WRONG = "wrong"
    RAISED = "raised"
    DIED = "died"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"

    @property
    def is_bad(self) -> bool:
        return self not in (Status.CORRECT, Status.NOT_RUN)


@dataclass(frozen=True, slots=True, order=True)
class Record:
    """One op of OpInfo, in one dtype and direction.

    Attributes:
        op: the OpInfo's name, and its variant's behind a slash.
        dtype: without "torch.".
        direction: "forward" or "backward".
        status: the worst of the samples.
        samples: how many were compared.
        compiled: overloads with tensors of `dtype` that the executables consist of, each once.
        eager: "op:reason" of what ran in eager: fallbacks between executables, and graph breaks of Dynamo's.
        detail: what is wrong; for a correct op what was not compared; else why it was not run.
    """

    op: str
    dtype: str
    direction: str
    status: str
    samples: int = 0
    compiled: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    detail: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.dtype, self.direction

    def line(self) -> str:
        cells = (" ".join(cell) if isinstance(cell, tuple) else str(cell) for cell in astuple(self))
        return "\t".join(" ".join(cell.split()) for cell in cells)

    @classmethod
    def parse(cls, line: str) -> Record:
        op, dtype, direction, status, samples, compiled, eager, detail = line.split("\t")
        return cls(op, dtype, direction, status, int(samples), tuple(compiled.split()), tuple(eager.split()), detail)


def read_records(path: Path = RESULTS) -> dict[tuple[str, str, str], Record]:
    """The records of a file by op, dtype and direction; nothing if there is no file."""
    if not path.exists():
        return {}
    records = map(Record.parse, path.read_text(encoding="utf-8").splitlines()[1:])
    return {record.key: record for record in records}


def write_records(records: Iterable[Record], path: Path = RESULTS) -> None:
    """Writes a heading and the records, sorted."""
    heading = "\t".join(field.name for field in fields(Record))
    lines = [heading, *(record.line() for record in sorted(records))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
