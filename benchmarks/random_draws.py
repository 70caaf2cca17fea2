"""Measures random ops, compiled and in eager, in turn in one process.

    python -m benchmarks.random_draws [--elements N] [--runs N]

Prints the median of each in milliseconds, and eager's time divided by the compiled time. Compiled times include the
call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def draws(elements: int) -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    rows = elements // 1024
    x = torch.randn(rows, 1024)
    return {
        "dropout": (lambda x: F.dropout(x, 0.1), (x,)),
        "gelu and dropout": (lambda x: F.dropout(F.gelu(x), 0.1), (x,)),
        "rand": (lambda: torch.rand(rows, 1024), ()),
        "randn": (lambda: torch.randn(rows, 1024), ()),
        "randint": (lambda: torch.randint(0, 1000, (rows, 1024)), ()),
        "randperm": (lambda: torch.randperm(rows), ()),
        "multinomial": (lambda w: torch.multinomial(w, 1), (x.abs(),)),
    }


def medians(functions: dict[str, Callable[..., Tensor]], args: tuple[Any, ...], runs: int) -> dict[str, float]:
    """Seconds of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(runs + 2):
        for name, function in functions.items():
            began = time.perf_counter()
            function(*args)
            if run > 1:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    for name, (function, args) in draws(arguments.elements).items():
        found = medians(
            {"compiled": torch.compile(function, backend="dynaxla"), "eager": function}, args, arguments.runs
        )
        compiled, eager = found["compiled"], found["eager"]
        print(f"{name:18} compiled {compiled * 1e3:8.3f} ms   eager {eager * 1e3:8.3f} ms   {eager / compiled:6.2f}")


if __name__ == "__main__":
    main()
