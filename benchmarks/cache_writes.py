"""Measures a key-value cache that is written in place: the time of a step by the cache's length.

    python -m benchmarks.cache_writes [--lengths N ...] [--layers N]

The step runs in eager, compiled ("in place"), compiled with copies of the caches ("copied"), and on the device, where the
caches' memory is donated. `write` writes one position of the caches of all layers; `attend` is a decoder's step: each
layer writes its key and value and attends to the first `VISIBLE` positions of its cache. The ways run one after the
other, not in turn: memory that copies free slows down the calls after them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run
from dynaxla.passes import in_place_writes

HEADS, WIDTH, VISIBLE = 8, 64, 64
WAYS = ("eager", "in place", "copied", "device")
Step = Callable[..., Tensor]


def write(caches: list[Tensor], position: Tensor, x: Tensor) -> Tensor:
    for cache in caches:
        cache.index_copy_(2, position, x)
    return x.sum()


def attend(caches: list[Tensor], position: Tensor, x: Tensor) -> Tensor:
    for keys, values in zip(caches[::2], caches[1::2], strict=True):
        keys.index_copy_(2, position, x)
        values.index_copy_(2, position, x + 1)
        x = F.scaled_dot_product_attention(x, keys[:, :, :VISIBLE], values[:, :, :VISIBLE])
    return x


def prepare(way: str, step: Step, length: int, layers: int) -> Run:
    torch.manual_seed(0)
    where = "dynaxla" if way == "device" else "cpu"
    x = torch.randn(1, HEADS, 1, WIDTH).to(where)
    caches = [torch.zeros(1, HEADS, length, WIDTH, device=where) for _ in range(2 * layers)]
    arguments: tuple[Any, ...] = (caches, torch.tensor([7], device=where), x)
    code = step.__code__.replace(co_name=way.replace(" ", "_"))  # Dynamo keeps what it compiles by code object
    own: Step = FunctionType(code, step.__globals__)
    if way != "eager":
        own = torch.compile(own, backend="dynaxla", dynamic=False)
        least = math.inf if way == "copied" else in_place_writes.LEAST_BYTES
        with torch.no_grad(), patch.object(in_place_writes, "LEAST_BYTES", least):
            own(*arguments)
    return torch.no_grad()(lambda number: own(*arguments))


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    dynaxla.use("cpu")
    for step in (write, attend):
        for length in given.lengths:
            ways = {way: partial(prepare, way, step, length, given.layers) for way in WAYS}
            size = 2 * given.layers * HEADS * length * WIDTH * 4 / 2**20
            yield Case(f"{step.__name__}, {length} positions", ways, in_turn=False, about=f"{size:.0f} MiB of caches")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--layers", type=int, default=4)


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
