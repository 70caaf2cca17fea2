"""Measures recurrent layers: eager, compiled as one graph, and compiled where Dynamo leaves the layer to eager.

    python -m benchmarks.rnn_speed

Each layer runs a forward without gradients ("infer"), and a forward and backward ("train").
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "LSTM 32 to 64, 8 x 50": (nn.LSTM(32, 64, batch_first=True), torch.randn(8, 50, 32)),
        "LSTM 128 to 256, 1 x 128": (nn.LSTM(128, 256, batch_first=True), torch.randn(1, 128, 128)),
        "GRU 128 to 256, 16 x 128": (nn.GRU(128, 256, batch_first=True), torch.randn(16, 128, 128)),
    }


def infer(call: Any, layer: nn.Module, x: Tensor) -> Run:
    return torch.no_grad()(lambda number: call(x)[0])


def train(call: Any, layer: nn.Module, x: Tensor) -> Run:
    def run(number: int) -> Any:
        call(x)[0].sum().backward()
        gradients = [each.grad for each in layer.parameters()]
        layer.zero_grad()
        return gradients

    return run


def call_in_eager(layer: nn.Module) -> Callable[[Tensor], Any]:
    """Compiles a function in which the layer is a graph break: torch.compile ignores a `disable` of what it is given itself."""
    disabled = torch.compiler.disable(layer)
    return torch.compile(lambda x: disabled(x), backend="dynaxla")


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda layer: layer,
    "one graph": lambda layer: torch.compile(layer, backend="dynaxla"),
    "graph break": call_in_eager,
}


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    torch.manual_seed(0)
    for name, (layer, x) in layers().items():
        for mode in (infer, train):
            ways = {way: partial(_prepare, mode, wrap, layer, x) for way, wrap in WAYS.items()}
            yield Case(f"{name}, {mode.__name__}", ways)


def _prepare(
    mode: Callable[[Any, nn.Module, Tensor], Run], wrap: Callable[[nn.Module], Any], layer: nn.Module, x: Tensor
) -> Run:
    return mode(wrap(layer), layer, x)


if __name__ == "__main__":
    run_cases(__doc__, make_cases)
