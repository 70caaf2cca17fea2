"""Measures uncompiled code on the device: ops run one by one ("eager"), run lazily ("fused"), and on torch's CPU.

    python -m benchmarks.device_modes

Every step reads a value, and is another one: a learning rate changes, sizes grow. The values are compared step by step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

import dynaxla
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.cases import Case, Run

KINDS = ("cpu", "eager", "fused")
STEPS = 15
GROWING = 48
"""Steps of the program whose sizes grow: behind twelve it has buckets where ops run one by one."""

Step = Callable[[int], float]


def _device(kind: str) -> str:
    return "cpu" if kind == "cpu" else "dynaxla"


def mlp(kind: str, width: int) -> Step:
    """A step of training with Adam."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = layers.to(_device(kind))
    x = torch.randn(64, width).to(_device(kind))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(number: int) -> float:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def transformer(kind: str) -> Step:
    """A forward of two layers: [4, 64, 128]."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(_device(kind))
    x = torch.randn(4, 64, 128).to(_device(kind))

    @torch.no_grad()
    def step(number: int) -> float:
        return model(x).sum().item()

    return step


def _random(kind: str, *sizes: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*sizes).to(_device(kind))


def growing(kind: str) -> Step:
    """Sizes that no step had before: a softmax of a product of [n, 64]."""
    x = _random(kind, 256, 64)

    def step(number: int) -> float:
        part = x[: 8 + number]
        return ((part @ part.T).softmax(-1) @ part).relu().mul(2).sum().item()

    return step


def small(kind: str) -> Step:
    """A chain of 60 ops on [32, 32]."""
    x = _random(kind, 32, 32)

    def step(number: int) -> float:
        y = x
        for _ in range(20):
            y = (y * 0.5 + x).tanh()
        return y.sum().item()

    return step


def cache(kind: str) -> Step:
    """A write of one row into 16 MB, and a sum over one row."""
    x = torch.zeros(4096, 1024).to(_device(kind))

    def step(number: int) -> float:
        x[number] = number
        return x[number].sum().item()

    return step


def unread(kind: str) -> Step:
    """20 times 101 small ops of which only the last is read: traces are cut in other places every time."""
    first = _random(kind, 32, 32)

    def step(number: int) -> float:
        x = first
        for _ in range(20):
            for _ in range(50):
                x = (x * 0.5).tanh()
            x = x + 1
        return x.sum().item()

    return step


PROGRAMS: Mapping[str, Callable[[str], Step]] = {
    "MLP 64, Adam": lambda kind: mlp(kind, 64),
    "MLP 512, Adam": lambda kind: mlp(kind, 512),
    "transformer, forward": transformer,
    "60 small ops": small,
    "sizes that grow": growing,
    "a row of 16 MB": cache,
    "2020 ops, one read": unread,
}


def prepare(make: Callable[[str], Step], kind: str) -> Run:
    step, numbers = make(kind), itertools.count()

    def run(number: int) -> float:
        with dynaxla.device_mode("fused" if kind == "fused" else "eager"):
            return step(next(numbers))

    return run


def make_cases() -> Iterator[tuple[Case, int]]:
    """Each with how many steps are timed behind the first."""
    for name, make in PROGRAMS.items():
        ways = {kind: partial(prepare, make, kind) for kind in KINDS}
        yield Case(name, ways, "cpu", check="always", tolerance=1e-3), (GROWING if make is growing else STEPS) - 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    given = parser.parse_args()
    dynaxla.use("cpu")
    with BenchSession(given, len(PROGRAMS)) as session:
        for case, steps in make_cases():
            # A step is never repeated within a sample: each is another one.
            session.measure(case, rounds=steps, most_rounds=steps, warm=2, repeats=1)
    print(dynaxla.read_metrics().traces, dynaxla.read_metrics().traces_apart, "traces, and traces apart")
    return session.status


if __name__ == "__main__":
    sys.exit(main())
