"""Measures a call of a compiled function on tensors of the device, and the same call with `jax.jit`, in microseconds.

python -m benchmarks.device_overhead
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

import dynaxla

ROUNDS, CALLS = 40, 50


def of_one(x: Any) -> Any:
    return x + 1


def of_many(x: Any, weights: Sequence[Any]) -> Any:
    for weight in weights:
        x = x + weight
    return x


class Many(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.randn(4) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return of_many(x, list(self.weights))  # type: ignore[no-any-return]


def fastest(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The shortest mean over `CALLS` calls of each, of interleaved rounds, in microseconds."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            for _ in range(CALLS):
                run()
            best[index] = min(best[index], (time.perf_counter() - started) / CALLS * 1e6)
    return best


@torch.no_grad()
def main() -> None:
    dynaxla.use("cpu")
    x = torch.ones(4, device="dynaxla")
    one = torch.compile(of_one, backend="dynaxla")
    model = Many(200).to("dynaxla")
    many = torch.compile(model, backend="dynaxla")
    their_x, theirs = jnp.ones(4), [jnp.asarray(weight.detach().cpu().numpy()) for weight in model.weights]
    their_one, their_many = jax.jit(of_one), jax.jit(of_many)
    cases = {
        "one input": (lambda: one(x), lambda: their_one(their_x)),
        "one input and 200 parameters": (lambda: many(x), lambda: their_many(their_x, theirs)),
        "an op, not compiled": (lambda: x + x, lambda: their_x + their_x),
    }
    print(f"{'':32}{'dynaxla':>10}{'jax.jit':>10}{'more':>10}")
    for name, runs in cases.items():
        for run in runs:
            run()
        mine, other = fastest(runs)
        print(f"{name:32}{mine:>10.1f}{other:>10.1f}{mine - other:>10.1f}")


if __name__ == "__main__":
    main()
