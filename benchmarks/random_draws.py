"""Measures random ops, compiled and in eager.

    python -m benchmarks.random_draws [--elements N]

The numbers differ from eager's, so they are not compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run


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


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for name, (function, args) in draws(given.elements).items():

        def run(function: Any = function, args: Any = args) -> Run:
            return lambda number: function(*args)

        def run_compiled(function: Any = function, args: Any = args) -> Run:
            compiled = torch.compile(function, backend="dynaxla")
            return lambda number: compiled(*args)

        yield Case(name, {"eager": run, "dynaxla": run_compiled}, check="never")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 20)


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
