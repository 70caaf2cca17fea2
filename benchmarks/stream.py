"""Measures a stream of requests whose sizes vary: number of programs, amount of padding, and time of a request.

    python -m benchmarks.stream                       # all models, without Inductor
    python -m benchmarks.stream encoder --inductor    # also Inductor with dynamic=True
    python -m benchmarks.stream --requests 50
    python -m benchmarks.stream --ways behind learned   # compile="behind", without and with buckets="learned"
    python -m benchmarks.stream --size-oblivious       # torch's switch under which batches of 1 need no graph of their own

Batch sizes are uniform from 1 to 8, lengths (and image sides) log-normal from 4 to 512 (images: 16 to 96). Every
request goes to every backend in turn, compiles included, so that noise of the machine affects all alike; every response
is compared with eager's. "default" sets no option about sizes: its buckets follow the stream once padding has cost more than
compiles. "planned" has a plan of the same stream with as many programs. "behind" compiles in the background with default
buckets, "learned" in the background with buckets planned from the requests. A later pass over the same requests
measures the steady state: the first pass after which as many passes as before compiled nothing.
`python -m dynaxla bench MODEL --vary ...` does the same for a model of yours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import dynaxla
from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.cases import Case, Run
from dynaxla.bench.records import CaseResult
from dynaxla.bench.workloads import Workload, load_workload, vary_sizes
from dynaxla.bucketing.joint_policy import JOINT, DimUsage
from dynaxla.options import require_member
from dynaxla.runtime_state import process

Sizes = tuple[int, int]
Built = tuple[nn.Module, tuple[torch.Tensor]]


def encoder(batch: int, length: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    return BertModel(config), (torch.randint(0, 30000, (batch, length)),)


def prefill(batch: int, length: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=8000)
    return GPT2LMHeadModel(config), (torch.randint(0, 8000, (batch, length)),)


class ConvNet(nn.Module):
    """Three convolutions of stride 2, and a head: [batch, 3, side, side] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(channels, out, 3, padding=1, stride=2), nn.BatchNorm2d(out), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


def images(batch: int, side: int) -> Built:
    return ConvNet(), (torch.randn(batch, 3, side, side),)


MODELS: Mapping[str, Callable[[int, int], Built]] = {"encoder": encoder, "prefill": prefill, "images": images}
VARY = {
    "encoder": ("0:0=1,2,3,4,5,6,7,8", "0:1=4..512~60"),
    "prefill": ("0:0=1,2,3,4,5,6,7,8", "0:1=4..512~60"),
    "images": ("0:0=1,2,3,4,5,6,7,8", "0:2,0:3=16..96~40"),
}


def make_encoder() -> Built:
    return MODELS["encoder"](4, 60)


def make_prefill() -> Built:
    return MODELS["prefill"](4, 60)


def make_images() -> Built:
    return MODELS["images"](4, 40)


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def count_default_buckets(sizes: Sequence[Sizes], image: bool, ones_apart: bool) -> int:
    """`ones_apart`: Dynamo makes a graph of its own of batch 1, in which one size less varies."""
    if image:
        sides, batches = JOINT.of(DimUsage((1, 1), 3, 2)), JOINT.of(DimUsage((1, 1, 1), 3, 3))
        return len({(1, sides.bucket(n, n)) if b == 1 and ones_apart else batches.bucket(b, n, n) for b, n in sizes})
    single, joint = dynaxla.Default(), JOINT.of(DimUsage((1, 1)))
    return len({(1, single.bucket(n)) if b == 1 and ones_apart else joint.bucket(b, n) for b, n in sizes})


def plan(workload: Workload, ones_apart: bool) -> BenchBackend:
    """A plan of these requests with as many programs as the default has buckets; images by their batch and longer side."""
    image = workload.name.endswith("make_images")
    sizes = [(batch, length) for batch, length in (each.values() for each in workload.sizes)]
    made = dynaxla.plan_buckets(sizes, max_executables=count_default_buckets(sizes, image, ones_apart))
    return BenchBackend("planned", "dynaxla", options={"buckets": {(0, (2, 3) if image else 1): made}})


WAYS = ("default", "planned", "behind", "learned")


def make_case(name: str, given: argparse.Namespace) -> Case:
    workload = load_workload(f"benchmarks.stream:make_{name}")
    workload.function.eval()  # type: ignore[attr-defined]
    workload = vary_sizes(workload, VARY[name], given.requests)
    known = {
        "default": BenchBackend("default", "dynaxla"),
        "planned": plan(workload, not given.size_oblivious),
        "behind": BenchBackend("behind", "dynaxla", options={"compile": "behind"}),
        "learned": BenchBackend("learned", "dynaxla", options={"compile": "behind", "buckets": "learned"}),
    }
    backends = [BenchBackend("eager", "eager"), *(known[way] for way in given.ways)]
    if given.inductor:
        backends.append(BenchBackend("inductor", "inductor", arguments={"dynamic": True}))
    ways = {each.text: partial(each.prepare, workload, train=False) for each in backends}
    adaptive = [way for way in given.ways if way != "planned"]
    settle = partial(settle_buckets, adaptive, len(workload.sizes)) if adaptive else None
    about = f"{given.requests} requests; {workload.about}"
    return Case(name, ways, inputs=workload.sizes, check="always", read=first, settle=settle, about=about)


def settle_buckets(ways: Sequence[str], requests: int, runs: Mapping[str, Run]) -> None:
    """Calls again, until the latter half of all passes, eight at least, compiled nothing: of parts that are called rarely the
    sizes are planned late."""
    told = dynaxla.read_metrics()
    print(f"  served in the first pass by own programs {told.served_own}, larger ones {told.served_larger}, "
          f"eager {told.served_eager}; jobs done {told.jobs_done}, failed {told.jobs_failed}, dropped {told.jobs_dropped}; "
          f"plans {told.plans}")  # fmt: skip
    passes = last = 1
    while passes < max(2 * last, 8):
        before, passes = dynaxla.read_metrics().executables, passes + 1
        for way in ways:
            for number in range(requests):
                runs[way](number)
        while not process().compile_service.idle:
            time.sleep(0.1)
        if dynaxla.read_metrics().executables != before:
            last = passes
    told = dynaxla.read_metrics()
    print(f"  at rest after pass {last} of {passes}: {told.executables} executables ever made, {told.plans} plans")


def print_program_costs(case: CaseResult) -> None:
    """Prints what a program, and so another bucket, takes on average, without its padding and loading."""
    for result in case.results:
        if (count := sum(result.programs)) and result.first is not None:
            stages = result.first.stages
            lowering_s, compile_s = stages["lowering"] / count, stages["compile"] / count
            print(f"  {result.name}: a program costs {lowering_s:.3f} s of lowering, {compile_s:.3f} s of XLA")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--size-oblivious", action="store_true")
    add_run_arguments(parser)
    given = parser.parse_args()
    for name in given.models:
        require_member(name, MODELS, "model")
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=given.size_oblivious)
    with oblivious, BenchSession(given, len(given.models or MODELS)) as session:
        for name in given.models or MODELS:
            print_program_costs(session.measure(make_case(name, given), seconds=0.0, rounds=1))
    return session.status


if __name__ == "__main__":
    raise SystemExit(main())
