"""A stream of requests whose sizes vary: how many executables, how much padding, and how long a request takes.

    python -m benchmarks.stream                       # all models, without Inductor
    python -m benchmarks.stream encoder --inductor    # Inductor with dynamic=True beside it
    python -m benchmarks.stream --requests 50

Batches are drawn evenly from 1 to 8, lengths (and image sides) log-normally from 4 to 512 (images: 16 to 96). Every request
goes to every backend in turn, compiles included, so that noise of the machine falls on all alike; every response is
compared with eager's. A second pass over the same requests is the steady state.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import dynaxla

Sizes = tuple[int, int]


@dataclass(frozen=True)
class Workload:
    """A model, and its input at a batch and a length (or an image's side)."""

    model: nn.Module
    make: Callable[[int, int], torch.Tensor]
    lengths: Sizes
    middle: float


def encoder() -> Workload:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    return Workload(BertModel(config), lambda b, n: torch.randint(0, 30000, (b, n)), (4, 512), 60)


def prefill() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=8000)
    return Workload(GPT2LMHeadModel(config), lambda b, n: torch.randint(0, 8000, (b, n)), (4, 512), 60)


def images() -> Workload:
    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, stride=2), nn.BatchNorm2d(out), nn.ReLU()]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128))
            self.head = nn.Linear(128, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x).mean((2, 3)))

    return Workload(Net(), lambda b, n: torch.randn(b, 3, n, n), (16, 96), 40)


WORKLOADS: dict[str, Callable[[], Workload]] = {"encoder": encoder, "prefill": prefill, "images": images}


def draw_requests(workload: Workload, count: int) -> list[Sizes]:
    """Batches and lengths; the same for every run."""
    chance = random.Random(0)
    low, high = workload.lengths
    lengths = [round(math.exp(chance.gauss(math.log(workload.middle), 0.9))) for _ in range(count)]
    return [(chance.randint(1, 8), min(max(length, low), high)) for length in lengths]


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def run_stream(
    calls: dict[str, Callable[[torch.Tensor], Any]], inputs: Sequence[torch.Tensor]
) -> dict[str, list[float]]:
    """Seconds per request and backend; raises AssertionError where an answer is not eager's."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for x in inputs:
        answers = {}
        for name, call in calls.items():
            started = time.perf_counter()
            answers[name] = first(call(x))
            seconds[name].append(time.perf_counter() - started)
        for name, answer in answers.items():
            torch.testing.assert_close(
                answer, answers["eager"], rtol=1e-4, atol=1e-4, msg=f"{name} at {tuple(x.shape)}"
            )
    return seconds


def report(title: str, seconds: dict[str, list[float]]) -> None:
    for name, times in seconds.items():
        cuts = statistics.quantiles(times, n=100)
        shown = "  ".join(
            f"{label} {value * 1e3:8.1f}" for label, value in (("p50", cuts[49]), ("p95", cuts[94]), ("p99", cuts[98]))
        )
        print(f"  {title:7s} {name:9s} {shown}  max {max(times) * 1e3:8.1f} ms   total {sum(times):6.1f} s")


def measure(name: str, requests: int, inductor: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    workload = WORKLOADS[name]()
    model = workload.model.eval()
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "eager": model,
        "dynaxla": torch.compile(model, backend="dynaxla"),
    }
    if inductor:
        calls["inductor"] = torch.compile(model, dynamic=True)
    sizes = draw_requests(workload, requests)
    inputs = [workload.make(*size) for size in sizes]
    before = dynaxla.read_metrics()
    cold = run_stream(calls, inputs)
    after = dynaxla.read_metrics()
    warm = run_stream(calls, inputs)
    policy = dynaxla.Default()
    volumes = [(b * n, policy.bucket(b) * policy.bucket(n)) for b, n in sizes]
    ratio = sum(padded for _, padded in volumes) / sum(true for true, _ in volumes)
    recompiled = dynaxla.read_metrics().compiles - after.compiles
    print(f"{name}: {requests} requests, {after.compiles - before.compiles} executables from {after.graphs - before.graphs} "
          f"graphs, {recompiled} more in the second pass; padded / true {ratio:.2f}; "
          f"exact shapes: {len(after.exact_shapes) - len(before.exact_shapes)}")  # fmt: skip
    report("cold", cold)
    report("warm", warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--inductor", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.models) - set(WORKLOADS):
        parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(WORKLOADS)}")
    with torch.no_grad():
        for name in given.models or WORKLOADS:
            measure(name, given.requests, given.inductor)


if __name__ == "__main__":
    main()
