"""Measures the cost of masks: a bucket's program at its full size against the program compiled for that size alone.

    python -m benchmarks.mask_cost                  # all models
    python -m benchmarks.mask_cost encoder --seconds 20

At a speed-up of 1 the masks cost nothing; below 1 they cost time.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

import dynaxla
from benchmarks.stream import MODELS, first
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run
from dynaxla.options import require_member

SIZES = {"encoder": ((8, 128), (4, 512)), "prefill": ((8, 128), (4, 512)), "images": ((8, 64), (8, 96))}


def run_static(model: nn.Module, x: Tensor) -> Run:
    compiled = torch.compile(model, backend="dynaxla", dynamic=False)
    return torch.inference_mode()(lambda number: compiled(x))


def run_bucket(model: nn.Module, x: Tensor) -> Run:
    """Marks the sizes, so that the first call compiles the bucket; a smaller call sees to it that it is one."""
    call = torch.compile(copy.deepcopy(model), backend="dynaxla", options={"bucketing": "require"})
    batch, length = x.shape[0], x.shape[-1]
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Explicit((batch,)))
    dims = [dim for dim, size in enumerate(x.shape) if size == length]
    for dim in dims:
        dynaxla.mark_bucketed(x, dim, policy=dynaxla.Explicit((length,)))
    smaller = x[: batch - 1]  # no inference tensor, as `x` is none: Dynamo captures these apart
    for dim in dims:
        smaller = smaller.narrow(dim, 0, length - 3)
    smaller = smaller.contiguous()
    with torch.inference_mode():
        call(x)
        with dynaxla.recorder().expect(compiles=0, graphs=0):
            call(smaller)
    return torch.inference_mode()(lambda number: call(x))


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for name in given.models or SIZES:
        require_member(name, SIZES, "model")
        for batch, length in SIZES[name]:
            torch.manual_seed(0)
            model, (x,) = MODELS[name](batch, length)
            ways = {"static": partial(run_static, model.eval(), x), "bucket": partial(run_bucket, model, x)}
            yield Case(f"{name}, {batch} x {length}", ways, "static", read=first)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SIZES)}; default: all")


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
