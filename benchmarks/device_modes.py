"""Measures uncompiled code on the device: ops run one by one ("eager"), run lazily ("fused"), and on torch's CPU.

`python -m benchmarks.device_modes` prints a table with each program's first step and the median of its later steps. The
modes take turns in one process. Every step reads a value.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

import dynaxla

KINDS = ("eager", "fused", "cpu")
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


def measure(make: Callable[[str], Step], count: int) -> dict[str, tuple[float, float]]:
    """For each kind the seconds of the first step, and the median of the later ones."""
    steps = {kind: make(kind) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(count):
        values = []
        for kind in KINDS:
            with dynaxla.device_mode("fused" if kind == "fused" else "eager"):
                started = time.perf_counter()
                values.append(steps[kind](number))
                times[kind].append(time.perf_counter() - started)
        torch.testing.assert_close(values[0], values[2], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values[1], values[2], rtol=1e-3, atol=1e-3)
    return {kind: (each[0], statistics.median(each[3:])) for kind, each in times.items()}


def main() -> None:
    dynaxla.use("cpu")
    print("| ms | " + " | ".join(f"{kind}: first | later" for kind in KINDS) + " |")
    print("|---|" + "---|---|" * len(KINDS))
    for name, make in PROGRAMS.items():
        found = measure(make, GROWING if make is growing else STEPS)
        print(
            f"| {name} | " + " | ".join(f"{a * 1e3:.0f} | {b * 1e3:.2f}" for a, b in found.values()) + " |", flush=True
        )
    print(dynaxla.read_metrics().traces, dynaxla.read_metrics().traces_apart, "traces, and traces apart")


if __name__ == "__main__":
    main()
