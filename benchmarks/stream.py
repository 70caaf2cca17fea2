"""Measures a stream of requests whose sizes vary: number of executables, amount of padding, and time of a request.

    python -m benchmarks.stream                       # all models, without Inductor
    python -m benchmarks.stream encoder --inductor    # also Inductor with dynamic=True
    python -m benchmarks.stream --requests 50
    python -m benchmarks.stream --ways behind learned   # compile="behind", without and with buckets="learned"
    python -m benchmarks.stream --size-oblivious       # torch's switch under which batches of 1 need no graph of their own

Batch sizes are uniform from 1 to 8, lengths (and image sides) log-normal from 4 to 512 (images: 16 to 96). Every
request goes to every backend in turn, compiles included, so that noise of the machine affects all alike; every response
is compared with eager's. "default" sets no option about sizes. "planned" has a plan of the same stream with as many
executables. "behind" compiles in the background with default buckets, "learned" in the background with buckets planned
from the requests. A later pass over the same requests measures the steady state: the first pass after which as many
passes as before compiled nothing.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import dynaxla
from dynaxla.bucketing.joint_policy import JOINT, DimUsage
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime_state import process

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


@dataclass(frozen=True)
class Padding:
    """How much a policy pads the requests.

    Attributes:
        programs: distinct buckets, those of batch 1 counted as the graph of their own that they are.
        ratio: padded elements per true element.
    """

    programs: int
    ratio: float

    @classmethod
    def of(cls, requests: Sequence[Sizes], exponent: int, bucket: Callable[[int, int], Sizes]) -> Padding:
        buckets = [bucket(*sizes) for sizes in requests]
        padded = sum(batch * length**exponent for batch, length in buckets)
        return cls(len(set(buckets)), padded / sum(batch * length**exponent for batch, length in requests))


def default_bucket(image: bool, ones_apart: bool) -> Callable[[int, int], Sizes]:
    """`ones_apart`: Dynamo makes a graph of its own of batch 1, in which one size less varies."""
    if image:
        sides, images = JOINT.of(DimUsage((1, 1), 3, 2)), JOINT.of(DimUsage((1, 1, 1), 3, 3))
        return lambda b, n: (1, sides.bucket(n, n)[0]) if b == 1 and ones_apart else images.bucket(b, n, n)[:2]
    single, joint = dynaxla.Default(), JOINT.of(DimUsage((1, 1)))
    return lambda b, n: (1, single.bucket(n)) if b == 1 and ones_apart else joint.bucket(b, n)


def planned(sizes: Sequence[Sizes], image: bool, most: int) -> tuple[Any, Callable[[int, int], Sizes]]:
    """Option `buckets` with as many programs; images by their batch and longer side."""
    plan = dynaxla.plan_buckets(sizes, max_executables=most)
    return {(0, (2, 3) if image else 1): plan}, plan.bucket


WAYS = ("default", "planned", "behind", "learned")


def measure(name: str, requests: int, ways: Sequence[str], inductor: bool, size_oblivious: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    workload = WORKLOADS[name]()
    model = workload.model.eval()
    sizes = draw_requests(workload, requests)
    image = name == "images"
    by_default = Padding.of(sizes, 2 if image else 1, default_bucket(image, not size_oblivious))
    buckets, bucket = planned(sizes, image, by_default.programs)
    by_plan = Padding.of(sizes, 2 if image else 1, bucket)
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "planned": {"buckets": buckets},
        "behind": {"compile": "behind"},
        "learned": {"compile": "behind", "buckets": "learned"},
    }
    calls: dict[str, Callable[[torch.Tensor], Any]] = {"eager": model}
    for way in ways:
        calls[way] = Counted(torch.compile(copy.deepcopy(model), backend="dynaxla", options=options[way]))
    if inductor:
        calls["inductor"] = torch.compile(copy.deepcopy(model), dynamic=True)
    inputs = [workload.make(*size) for size in sizes]
    cold = run_stream(calls, inputs)
    for way in ways:
        counted = calls[way]
        assert isinstance(counted, Counted)
        counted.report(by_plan if way == "planned" else by_default)
    if behind := {"behind", "learned"} & set(ways):
        settle_behind(behind, calls, inputs)
    before = dynaxla.read_metrics()
    warm = run_stream(calls, inputs)
    after = dynaxla.read_metrics()
    print(f"  executables made in the warm pass: {after.executables - before.executables}")
    report("cold", cold)
    after_ten = {name: statistics.quantiles(times[10:], n=100)[98] for name, times in cold.items()}
    print("  p99 after ten requests: " + "  ".join(f"{name} {value * 1e3:.1f} ms" for name, value in after_ten.items()))
    report("warm", warm)
    print("  warm, times eager's: " + "  ".join(f"{way} {sum(warm[way]) / sum(warm['eager']):.2f}" for way in ways))


def settle_behind(
    ways: set[str], calls: dict[str, Callable[[torch.Tensor], Any]], inputs: Sequence[torch.Tensor]
) -> None:
    """Calls again, until the latter half of all passes, eight at least, compiled nothing: of parts that are called rarely the
    sizes are planned late."""
    told = dynaxla.read_metrics()
    print(f"  served in the first pass by own programs {told.served_own}, larger ones {told.served_larger}, "
          f"eager {told.served_eager}; jobs done {told.jobs_done}, failed {told.jobs_failed}, dropped {told.jobs_dropped}; "
          f"plans {told.plans}")  # fmt: skip
    passes = last = 1
    while passes < max(2 * last, 8):
        before, passes = dynaxla.read_metrics().executables, passes + 1
        for way in sorted(ways):
            for x in inputs:
                calls[way](x)
        while not process().compile_service.idle:
            time.sleep(0.1)
        if dynaxla.read_metrics().executables != before:
            last = passes
    told = dynaxla.read_metrics()
    print(f"  at rest after pass {last} of {passes}: {told.executables} executables ever made, {told.plans} plans")


@contextmanager
def padding_timed() -> Iterator[list[float]]:
    """The seconds that each padding of a graph inside takes."""
    taken: list[float] = []
    pad = PartGraphs.pad

    def timed(graphs: PartGraphs, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return pad(graphs, *args)
        finally:
            taken.append(time.perf_counter() - started)

    with mock.patch.object(PartGraphs, "pad", timed):
        yield taken


class Counted:
    """A compiled model, and what its calls compiled."""

    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        self._call = call
        self._graphs: list[int] = []
        self._compiles: list[int] = []
        self._buckets: list[tuple[float, float, float]] = []

    def __call__(self, x: torch.Tensor) -> Any:
        before = dynaxla.read_metrics()
        with padding_timed() as paddings:
            result = self._call(x)
        after = dynaxla.read_metrics()
        if after.compiles - before.compiles == 1 and after.graphs == before.graphs:
            lowering_s, compile_s = after.lowering_s - before.lowering_s, after.compile_s - before.compile_s
            self._buckets.append((sum(paddings), lowering_s, compile_s))
        self._graphs.append(after.graphs - before.graphs)
        self._compiles.append(after.compiles - before.compiles)
        return result

    def report(self, padding: Padding) -> None:
        print(f"  {self.settle()} executables; graphs captured at requests "
              f"{[i + 1 for i, graphs in enumerate(self._graphs) if graphs]}; policy: {padding.programs} buckets, "
              f"padded / true {padding.ratio:.2f}")  # fmt: skip
        if self._buckets:
            padding_s, lowering_s, xla_s = map(statistics.median, zip(*self._buckets, strict=True))
            print(f"  a further bucket costs {padding_s:.3f} s padding, {lowering_s:.3f} s lowering, {xla_s:.3f} s XLA")

    def settle(self) -> int:
        """The number of executables since the last time."""
        compiled, self._compiles = sum(self._compiles), []
        return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--size-oblivious", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.models) - set(WORKLOADS):
        parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(WORKLOADS)}")
    # The models of one workload share Dynamo's limit of graphs per function.
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=given.size_oblivious)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64), oblivious:
        for name in given.models or WORKLOADS:
            print(f"{name}: {given.requests} requests")
            with fresh_cache():  # of Inductor's
                measure(name, given.requests, given.ways, given.inductor, given.size_oblivious)


if __name__ == "__main__":
    main()
