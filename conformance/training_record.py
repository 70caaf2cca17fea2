"""Reads and writes the training sweep's results: one line for each architecture, in `results/training.tsv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import MappingProxyType

from conformance.sweep_record import Status

RESULTS = Path(__file__).parent / "results" / "training.tsv"

SENSITIVE = "sensitive"
"""Float32 tells nothing: eager from weights that are off by one rounding differs from eager by more than the limit. In float64,
where kinks and batch norms over few values do not make that much of a rounding, compiled and eager agree."""
WIDE_LIMIT = 1e-6

NOT_TRAINED: Mapping[str, str] = MappingProxyType(
    {
        "llama-decode-step": "one token against a cache",
        "qwen3-decode-step": "one token against a cache",
        "longformer": "a window of nothing but padding makes its gradients NaN, in eager",
    }
)
"""Architectures of the zoo that nobody trains, and why."""


@dataclass(frozen=True, slots=True)
class Training:
    """One architecture of the zoo.

    Attributes:
        architecture, family: of the zoo.
        status: a `Status`, or `SENSITIVE`.
        loss, gradients, state: the largest relative differences from eager's, see `tests.zoo.training_check`.
        noise: eager's own, of gradients in float32 from those in float64; NaN where an op does not take float64.
        parameters: how many tensors are trained.
        zeros: how many of their gradients are zero but for rounding.
        without: how many have no gradient, in eager and compiled.
        graphs: of forward and backward.
        executables: how many were compiled in all steps.
        eager: of each op that ran in eager, and each graph break of Dynamo's, the reason, behind ";".
        detail: what is wrong, or why it was not run.
    """

    architecture: str
    family: str
    status: str
    loss: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    noise: float = 0.0
    parameters: int = 0
    zeros: int = 0
    without: int = 0
    graphs: int = 0
    executables: int = 0
    eager: str = ""
    detail: str = ""

    @property
    def is_correct(self) -> bool:
        return self.status == Status.CORRECT.value

    @property
    def is_whole(self) -> bool:
        """Correct, and nothing of it ran in eager."""
        return self.is_correct and not self.eager

    def line(self) -> str:
        cells = (f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in astuple(self))
        return "\t".join(" ".join(cell.split()) for cell in cells)

    @classmethod
    def parse(cls, line: str) -> Training:
        cells = line.split("\t")
        return cls(*cells[:3], *map(float, cells[3:7]), *map(int, cells[7:12]), *cells[12:])  # type: ignore[arg-type]


def read_trainings(path: Path = RESULTS) -> dict[str, Training]:
    """By architecture; nothing if there is no file."""
    if not path.exists():
        return {}
    found = map(Training.parse, path.read_text(encoding="utf-8").splitlines()[1:])
    return {training.architecture: training for training in found}


def write_trainings(trainings: Iterable[Training], path: Path = RESULTS) -> None:
    """Writes a heading and the lines as they come."""
    heading = "\t".join(field.name for field in fields(Training))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([heading, *(training.line() for training in trainings)]) + "\n", encoding="utf-8")
