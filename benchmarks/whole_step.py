"""Measures a training step as one executable against the usual three.

    python -m benchmarks.whole_step                    # every net
    python -m benchmarks.whole_step mlp-32 --seconds 5

The steps are those of examples/whole_step.py: cross-entropy and AdamW on images [batch, 8, 8]. The first losses are
compared. A speed-up is the time of the three executables ("pieces") divided by the way's in the same round.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run
from dynaxla.options import require_member
from examples.whole_step import functional, in_pieces, in_place

PIECES = "pieces"


def mlp(width: int) -> nn.Module:
    inner = [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, 10))


def transformer(width: int, layers: int) -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Flatten(), nn.Linear(8 * width, 10))


# The net, and the batch it is trained on.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp-32": (lambda: mlp(32), 32),
    "mlp-512": (lambda: mlp(512), 32),
    "mlp-2048": (lambda: mlp(2048), 32),
    "transformer-32x2": (lambda: transformer(32, 2), 32),
    "transformer-128x2": (lambda: transformer(128, 2), 32),
    "transformer-256x4": (lambda: transformer(256, 4), 32),
}
WAYS = {
    "eager": (in_pieces, False),
    PIECES: (in_pieces, True),
    "in place": (in_place, True),
    "functional": (functional, True),
}


def prepare(build: Callable[..., Any], wrap: Callable[..., Any], net: nn.Module, batch: Any) -> Run:
    step = build(copy.deepcopy(net), wrap)
    return lambda number: step(*batch)


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for name in given.nets or CASES:
        require_member(name, CASES, "net")
        torch.manual_seed(0)
        make, batch = CASES[name]
        net, data = make(), (torch.rand(batch, 8, 8), torch.randint(0, 10, (batch,)))
        ways = {
            way: partial(prepare, build, _compile if compiled else _leave, net, data)
            for way, (build, compiled) in WAYS.items()
        }
        yield Case(name, ways, PIECES, about=f"{sum(p.numel() for p in net.parameters()):,} parameters")


def _compile(function: Any, **how: Any) -> Any:
    return torch.compile(function, backend="dynaxla", **how)


def _leave(function: Any, **_: Any) -> Any:
    return function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(CASES)}; default: all")


if __name__ == "__main__":
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        run_cases(__doc__, make_cases, add_arguments)
