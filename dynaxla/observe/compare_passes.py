"""Finds the pass that changes a result: runs the graphs that `DYNAXLA_DEBUG=dump=DIR,stages=passes` wrote, in order.

python -m dynaxla.observe.compare_passes DIR/p1234_graph_000
"""

from __future__ import annotations

import argparse
import math
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaxla.observe.differences import measure_difference

# Exceptions that an op or a line of Python raises for arguments that it cannot take.
_RUN_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


@dataclass(frozen=True, slots=True)
class PassResult:
    """The results of a dumped graph, run in eager PyTorch, compared with those of the graph before it.

    Attributes:
        name: the pass after which the graph was written; the first is "captured".
        difference: the largest difference of an element from the graph before it, divided by the largest element there;
            infinite if sizes, dtypes, NaN or infinities differ.
        error: the exception that ended the run; the next graph is then compared with the last one that ran.
    """

    name: str
    difference: float
    error: str = ""


def compare_passes(folder: Path) -> list[PassResult]:
    """Runs the graphs of one folder, in order, with the same random inputs and the same seed.

    An output that a graph returns as None, because torch computes it from the others from then on, is not compared. Control
    flow that became an operator runs only in the process that compiled it, while the compiled function exists.
    """
    steps: list[PassResult] = []
    before: Sequence[Any] | None = None
    for script in sorted(folder.glob("00_passes_*.py")):
        name = script.stem.split("_", maxsplit=3)[3]
        try:
            results = _run(script)
        except _RUN_ERRORS as error:
            steps.append(PassResult(name, math.nan, f"{type(error).__name__}: {error}".strip()))
            continue
        steps.append(PassResult(name, 0.0 if before is None else _difference(before, results)))
        before = results
    return steps


@torch.no_grad()
def _run(script: Path) -> Sequence[Any]:
    tensors = script.with_suffix(".pt")
    held = torch.load(tensors) if tensors.exists() else {}
    torch.manual_seed(0)
    results = runpy.run_path(str(script))["run"](held)
    return results if isinstance(results, (tuple, list)) else [results]


def _difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    pairs = zip(before, after, strict=False)  # outputs that others are computed from come last
    return max((_max_difference(x, y) for x, y in pairs if x is not None and y is not None), default=0.0)


def _max_difference(x: Any, y: Any) -> float:
    difference = measure_difference(y, x)
    return math.inf if difference.problem else difference.relative


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints every pass that changed a graph, with the difference of the results. Returns 2 if a folder has no dump."""
    parser = argparse.ArgumentParser(prog="python -m dynaxla.observe.compare_passes", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="one graph's folder, of a dump with the stage `passes`")
    all_steps = {folder: compare_passes(folder) for folder in parser.parse_args(arguments).folder}
    for folder, steps in all_steps.items():
        print(f"{folder.name}:")
        for step in steps:
            print(f"  {step.name:16} {step.error or f'{step.difference:.1e}'}")
    return 0 if all(all_steps.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
