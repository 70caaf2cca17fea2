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

# What an op, or a line of Python, says to what it cannot take.
_FAULTS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


@dataclass(frozen=True, slots=True)
class Step:
    """The results of a dumped graph, run in eager PyTorch, against those of the graph before it.

    Attributes:
        name: the pass after which the graph was written; the first is "captured".
        difference: the largest difference of an element of its results from those of the graph before it, as a share of the
            largest element there; infinite where sizes, dtypes, NaN or infinities are others.
        error: the exception that ended the run; the next graph is then compared with the last one that ran.
    """

    name: str
    difference: float
    error: str = ""


def compare_passes(folder: Path) -> list[Step]:
    """Runs the graphs of one folder, in order, on the same random inputs and with the same random draws.

    An output for which a graph gives None, because torch makes it of the others from then on, is not compared. Control flow
    that became an operator can be run in the process that compiled it alone, as long as the compiled function lives.
    """
    steps: list[Step] = []
    before: Sequence[Any] | None = None
    for script in sorted(folder.glob("00_passes_*.py")):
        name = script.stem.split("_", maxsplit=3)[3]
        try:
            results = _run(script)
        except _FAULTS as error:
            steps.append(Step(name, math.nan, f"{type(error).__name__}: {error}".strip()))
            continue
        steps.append(Step(name, 0.0 if before is None else _difference(before, results)))
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
    pairs = zip(before, after, strict=False)  # behind the graph's own outputs stand those that others are made of
    return max((_apart(x, y) for x, y in pairs if x is not None and y is not None), default=0.0)


def _apart(x: Any, y: Any) -> float:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return 0.0 if x == y else math.inf
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0
    apart = torch.where(same, 0, x - y).abs().max().item()
    largest = torch.where(x.isfinite(), x, 0).abs().max().item()
    return apart / largest if largest and math.isfinite(apart) else math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints every pass that changed a graph with what it changed in the results; 2 if a folder has none."""
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
