"""Measures attention alone, compiled and in eager.

    python -m benchmarks.attention_speed [--calls HEADS,LENGTH,WIDTH ...]

The sizes are those of a BERT, of longer sequences, and of a small UNet with heads of 8.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

CALLS = ("12,128,64", "12,512,64", "12,1024,64", "8,1024,8")


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for sizes in given.calls:
        query, key, value = torch.randn(3, 1, *map(int, sizes.split(",")))

        def run(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> Run:
            return lambda number: F.scaled_dot_product_attention(query, key, value)

        def run_compiled(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> Run:
            compiled = torch.compile(F.scaled_dot_product_attention, backend="dynaxla")
            return lambda number: compiled(query, key, value)

        yield Case(sizes, {"eager": run, "dynaxla": run_compiled})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", nargs="+", default=CALLS)


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
