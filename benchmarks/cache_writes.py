"""Measures a key-value cache that is written in place: the time of a step by the cache's length.

    python -m benchmarks.cache_writes [--lengths N ...] [--layers N] [--runs N]

The step runs compiled, compiled with copies of the caches, in eager, and on the device, where the caches' memory is
donated. `write` writes one position of the caches of all layers; `attend` is a decoder's step: each layer writes its
key and value and attends to the first `VISIBLE` positions of its cache. Prints medians in milliseconds. The variants
run one after the other, not in turn: memory that copies free slows down the calls after them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.passes import in_place_writes

HEADS, WIDTH, VISIBLE = 8, 64, 64
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


def compiled(step: Step, arguments: tuple[Any, ...], *, copying: bool) -> Step:
    function = torch.compile(step, backend="dynaxla", dynamic=False)
    with (
        torch.no_grad(),
        patch.object(in_place_writes, "LEAST_BYTES", math.inf if copying else in_place_writes.LEAST_BYTES),
    ):
        function(*arguments)
    return function


def measure(step: Step, length: int, layers: int, runs: int) -> dict[str, float]:
    """Seconds of a step."""
    times: dict[str, list[float]] = {}
    functions: dict[str, tuple[Step, tuple[Any, ...]]] = {}
    for name in ("in place", "copied", "eager", "device"):
        where = "dynaxla" if name == "device" else "cpu"
        caches = [torch.zeros(1, HEADS, length, WIDTH, device=where) for _ in range(2 * layers)]
        arguments = (caches, torch.tensor([7], device=where), torch.randn(1, HEADS, 1, WIDTH, device=where))
        code = step.__code__.replace(co_name=name.replace(" ", "_"))  # Dynamo keeps what it compiles by code object
        own = FunctionType(code, step.__globals__)
        functions[name] = (own if name == "eager" else compiled(own, arguments, copying=name == "copied"), arguments)
    for name, (function, arguments) in functions.items():
        for _ in range(runs):
            with torch.no_grad():
                began = time.perf_counter()
                function(*arguments)
                times.setdefault(name, []).append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    dynaxla.use("cpu")
    for step in (write, attend):
        for length in arguments.lengths:
            found = measure(step, length, arguments.layers, arguments.runs)
            size = 2 * arguments.layers * HEADS * length * WIDTH * 4 / 2**20
            row = "   ".join(f"{name} {seconds * 1e3:8.3f}" for name, seconds in found.items())
            print(f"{step.__name__:8} {length:6} positions, {size:6.0f} MiB of caches   {row}", flush=True)


if __name__ == "__main__":
    main()
