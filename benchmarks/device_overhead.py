"""Measures a call of a compiled function on tensors of the device, and the same call with `jax.jit`.

python -m benchmarks.device_overhead
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import dynaxla
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case


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


def read(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    dynaxla.use("cpu")
    x = torch.ones(4, device="dynaxla")
    one = torch.compile(of_one, backend="dynaxla")
    model = Many(200).to("dynaxla")
    many = torch.compile(model, backend="dynaxla")
    their_x, theirs = jnp.ones(4), [jnp.asarray(weight.detach().cpu().numpy()) for weight in model.weights]
    their_one, their_many = jax.jit(of_one), jax.jit(of_many)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "one input": (lambda: one(x), lambda: their_one(their_x)),
        "one input and 200 parameters": (lambda: many(x), lambda: their_many(their_x, theirs)),
        "an op, not compiled": (lambda: x + x, lambda: their_x + their_x),
    }
    for name, (mine, other) in pairs.items():
        calls = {"jax.jit": other, "dynaxla": mine}
        ways = {way: lambda call=call: torch.no_grad()(lambda number: call()) for way, call in calls.items()}
        yield Case(name, ways, "jax.jit", read=read)


if __name__ == "__main__":
    run_cases(__doc__, make_cases)
