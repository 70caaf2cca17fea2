"""Finds which parts of the zoo's models are compiled per exact shape when sizes vary, and why.

`python -m conformance.refusals [NAMES]` runs each architecture at several batch sizes, lengths and image sizes, with
junk in the padding, compares every output with eager's, and prints the reasons; `--write` writes them into
docs/refusals.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import dynaxla
import dynaxla.errors
from conformance.varying import Varying, find_varying
from tests.bucketing.poison import poison_padding
from tests.tolerances import RELATIVE
from tests.zoo.architecture import Architecture
from tests.zoo.compare import worst_leaf
from tests.zoo.registry import ARCHITECTURES, find

DOCUMENT = Path(__file__).parent.parent / "docs" / "refusals.md"
RAISED = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, dynaxla.errors.DynaxlaError)
_REFUSED = re.compile(
    r"(?P<op>\S+(?: \S+)?) cannot run on padded values, so its part is compiled per exact shape: (?P<detail>.*)"
)


@dataclass(frozen=True)
class Found:
    """What one architecture did.

    Attributes:
        varying: names of the dims that varied.
        executables: how many were compiled, for graphs at two buckets of every dim.
        refused: for each refusal the op and the reason, each once.
        error: the largest error of an output, relative to eager's; what was raised, if anything was.
    """

    name: str
    varying: tuple[str, ...]
    executables: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    error: float | str = 0.0

    @property
    def is_wrong(self) -> bool:
        return isinstance(self.error, str) or self.error > RELATIVE[torch.float32]

    def __str__(self) -> str:
        head = f"{self.name}: varying {', '.join(self.varying) or 'nothing'}; {self.executables} executables"
        error = f"; ERROR {self.error}" if self.is_wrong else ""
        return "\n".join([head + error, *(f"    {op}: {why}" for op, why in self.refused)])


def examine(architecture: Architecture) -> Found:
    """Runs an architecture at its trials, compiled and in eager."""
    varying = find_varying(architecture.name, architecture.build(torch.float32))
    if not varying.trials:
        return Found(architecture.name, ())
    torch._dynamo.reset()
    before = dynaxla.read_metrics()
    with poison_padding():
        error = _largest_error(varying)
    after = dynaxla.read_metrics()
    lines = after.exact_shapes[len(before.exact_shapes) :]
    refused = tuple(dict.fromkeys(map(_op_and_reason, lines)))
    return Found(architecture.name, tuple(varying.trials[0]), after.compiles - before.compiles, refused, error)


@torch.no_grad()
def _largest_error(varying: Varying) -> float | str:
    net = varying.built[0]
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    worst = 0.0
    for trial in varying.trials:
        results = []
        for run in (compiled, net):
            args, kwargs = varying.inputs(trial)
            try:
                results.append(run(*args, **kwargs))
            except RAISED as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        worst = max(worst, worst_leaf(*results)[1])
    return worst


def _op_and_reason(line: str) -> tuple[str, str]:
    """Without the place in the model's source, which is another's."""
    matched = _REFUSED.match(line)
    assert matched is not None, line
    return matched["op"], matched["detail"].split("; at ")[0]


def read_document(text: str) -> dict[str, list[str]]:
    """The table's lines, by architecture."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].isdigit():
            lines.setdefault(cells[0], []).append(line)
    return lines


def lines_of(found: Found) -> list[str]:
    """An architecture's lines of the table: one for each refusal."""
    head = f"| {found.name} | {', '.join(found.varying) or 'none'} | {found.executables} |"
    if found.is_wrong:
        return [f"{head} | eager's numbers are not met: {found.error} |"]
    return [f"{head} `{op}` | {why} |" for op, why in found.refused] or [f"{head} | |"]


def write_document(lines: Mapping[str, Sequence[str]]) -> str:
    """docs/refusals.md."""
    varying = {name: rows for name, rows in lines.items() if "| none |" not in rows[0]}
    refused = [name for name, rows in varying.items() if "`" in rows[0]]
    head = [
        "# Refusals over the zoo",
        "",
        "Which ops keep parts of the zoo's models (tests/zoo) from being padded to buckets, and why. Written by",
        "`python -m conformance.refusals --write [NAMES]`, which replaces the lines of the architectures that it ran.",
        "Each runs at varying sizes (`torch.compile(..., dynamic=True)`, float32, inference), with junk in the padding;",
        "every output is compared with eager's.",
        "",
        f"Of {len(lines)} architectures {len(varying)} have inputs whose sizes may vary; {len(refused)} of these have",
        "parts that are compiled per exact shape.",
        "",
        "| architecture | varying dims | executables | refused op | reason |",
        "|---|---|---|---|---|",
    ]
    return (
        "\n".join([*head, *(row for architecture in ARCHITECTURES for row in lines.get(architecture.name, ()))]) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures of the zoo; all of them if none is named")
    parser.add_argument("--write", action="store_true", help="write docs/refusals.md")
    asked = parser.parse_args()
    wrong = []
    for architecture in [find(name) for name in asked.names] or ARCHITECTURES:
        found = examine(architecture)
        print(found, flush=True)
        wrong += [found.name] if found.is_wrong else []
        if asked.write:
            known = read_document(DOCUMENT.read_text()) if DOCUMENT.exists() else {}
            DOCUMENT.write_text(write_document({**known, found.name: lines_of(found)}))
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
