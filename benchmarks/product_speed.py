"""Measures linear layers of few rows, compiled and in eager, as a model that generates token by token calls them.

python -m benchmarks.product_speed [--sizes IN,OUT ...] [--rows N ...] [--dtypes float32 bfloat16]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

SIZES = ("768,3072", "4096,4096", "576,49152")
ROWS = (1, 2, 8, 32, 64, 128)


def run(layer: nn.Module, x: torch.Tensor) -> Run:
    return lambda number: layer(x)


def run_compiled(layer: nn.Module, x: torch.Tensor) -> Run:
    return run(torch.compile(layer, backend="dynaxla", dynamic=False), x)  # type: ignore[arg-type]


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for dtype in given.dtypes:
        for sizes in given.sizes:
            inputs, outputs = map(int, sizes.split(","))
            layer = nn.Linear(inputs, outputs, bias=False, dtype=getattr(torch, dtype)).requires_grad_(False)
            for rows in given.rows:
                x = torch.randn(rows, inputs, dtype=layer.weight.dtype)
                ways = {"eager": partial(run, layer, x), "dynaxla": partial(run_compiled, layer, x)}
                yield Case(f"{rows} x {sizes} {dtype}", ways)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="features in and out of a layer")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
