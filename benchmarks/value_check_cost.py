"""Measures what the checks of values cost on the CPU: calls with indices and divisors, checked, unchecked and in eager.

python -m benchmarks.value_check_cost [--calls NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def make_calls() -> dict[str, Call]:
    table, rows = torch.randn(4096, 64), torch.randint(0, 4096, (20_000,))
    places, values = torch.randint(0, 4096, (20_000, 64)), torch.randn(20_000, 64)
    whole, divisors = torch.randint(1, 100, (2, 100_000))
    return {
        "embedding of 16": (lambda w, i: F.embedding(i, w), (torch.randn(1000, 64), torch.arange(16))),
        "index_select": (lambda x, i: x.index_select(0, i), (table, rows)),
        "index_add": (lambda x, i, y: x.index_add(0, i, y), (table, rows, values)),
        "gather": (lambda x, i: x.gather(0, i), (table, places)),
        "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), (table, places, values)),
        "//": (lambda x, y: x // y, (whole, divisors)),
        "cross_entropy": (F.cross_entropy, (torch.randn(512, 1000), torch.randint(0, 1000, (512,)))),
    }


def run(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Run:
    return lambda number: function(*args)


def run_compiled(function: Callable[..., Tensor], args: tuple[Tensor, ...], *, checks: bool) -> Run:
    return run(torch.compile(function, backend="dynaxla", dynamic=False, options={"value_checks": checks}), args)


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    calls = make_calls()
    for name in given.calls or calls:
        ways = {
            "eager": partial(run, *calls[name]),
            "checked": partial(run_compiled, *calls[name], checks=True),
            "unchecked": partial(run_compiled, *calls[name], checks=False),
        }
        yield Case(name, ways)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", nargs="+", choices=make_calls())


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
