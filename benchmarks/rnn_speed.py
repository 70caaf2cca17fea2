"""Measures recurrent layers: eager, compiled as one graph, and compiled where Dynamo leaves the layer to eager, in turn.

    python -m benchmarks.rnn_speed [--runs N]

Prints the median of a forward without gradients and of a training step in milliseconds, for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.random_draws import medians


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "LSTM 32 to 64, 8 x 50": (nn.LSTM(32, 64, batch_first=True), torch.randn(8, 50, 32)),
        "LSTM 128 to 256, 1 x 128": (nn.LSTM(128, 256, batch_first=True), torch.randn(1, 128, 128)),
        "GRU 128 to 256, 16 x 128": (nn.GRU(128, 256, batch_first=True), torch.randn(16, 128, 128)),
    }


def infer(layer: Any) -> Callable[[Tensor], Any]:
    return torch.no_grad()(lambda x: layer(x)[0])


def train(layer: Any) -> Callable[[Tensor], Any]:
    return lambda x: layer(x)[0].sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    for name, (layer, x) in layers().items():
        broken = torch.compile(torch.compiler.disable(layer), backend="dynaxla")
        variants = {"eager": layer, "one graph": torch.compile(layer, backend="dynaxla"), "graph break": broken}
        for mode in (infer, train):
            found = medians({each: mode(run) for each, run in variants.items()}, (x,), runs)
            times = "   ".join(f"{each} {seconds * 1e3:9.3f}" for each, seconds in found.items())
            print(f"{name:26} {mode.__name__:6} {times}", flush=True)


if __name__ == "__main__":
    main()
