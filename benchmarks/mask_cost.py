"""Measures the cost of masks: a bucket's program at its full size against the program compiled for that size alone.

    python -m benchmarks.mask_cost                  # all models
    python -m benchmarks.mask_cost encoder --rounds 50

Both programs run the same input in turn in one process. A ratio is the median over rounds of the static program's time
divided by the bucket's in the same round. At 1 the masks cost nothing; below 1 they cost time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import dynaxla
from benchmarks.stream import WORKLOADS, first

SIZES = {"encoder": ((8, 128), (4, 512)), "prefill": ((8, 128), (4, 512)), "images": ((8, 64), (8, 96))}


def measure(name: str, batch: int, length: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of the static program, and the ratio."""
    torch._dynamo.reset()
    workload = WORKLOADS[name]()
    model = workload.model.eval()
    x = workload.make(batch, length)
    static = torch.compile(model, backend="dynaxla", dynamic=False)
    bucketed = torch.compile(copy.deepcopy(model), backend="dynaxla", options={"bucketing": "require"})
    run_bucket(bucketed, workload.make, batch, length)
    torch.testing.assert_close(first(bucketed(x)), first(static(x)), rtol=1e-4, atol=1e-4)
    times: dict[str, list[float]] = {"static": [], "bucketed": []}
    for _ in range(rounds):
        for key, call in (("static", static), ("bucketed", bucketed)):
            started = time.perf_counter()
            call(x)
            times[key].append(time.perf_counter() - started)
    ratio = statistics.median(s / b for s, b in zip(times["static"], times["bucketed"], strict=True))
    return statistics.median(times["static"]) * 1e3, ratio


def run_bucket(call: nn.Module, make: Callable[[int, int], torch.Tensor], batch: int, length: int) -> None:
    """Compiles the bucket, and sees to it that it is one: a smaller size runs in it too."""
    x = make(batch, length)
    dims = [dim for dim, size in enumerate(x.shape) if size == length]
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Explicit((batch,)))
    for dim in dims:
        dynaxla.mark_bucketed(x, dim, policy=dynaxla.Explicit((length,)))
    call(x)
    with dynaxla.recorder().expect(compiles=0, graphs=0):
        call(make(batch - 1, length - 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SIZES)}; default: all")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    if unknown := set(given.models) - set(SIZES):
        parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(SIZES)}")
    with torch.inference_mode():
        for name in given.models or SIZES:
            for batch, length in SIZES[name]:
                milliseconds, ratio = measure(name, batch, length, given.rounds)
                print(f"{name:8s} {batch} x {length:3d}: static {milliseconds:7.1f} ms, static / bucketed {ratio:.3f}")


if __name__ == "__main__":
    main()
