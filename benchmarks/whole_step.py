"""Measures a training step as one executable against the usual three, in turn in one process, and prints ratios.

    python -m benchmarks.whole_step                    # every net
    python -m benchmarks.whole_step mlp-32 --seconds 5

The steps are those of examples/whole_step.py: cross-entropy and AdamW on images [batch, 8, 8]. Each round times one
step of every way to write it in turn. A ratio is the median over rounds of the time of the three executables divided by
the way's in the same round. Above 1 the way is faster than three executables.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynaxla
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


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Median milliseconds of a step by way, ratios to the pieces, executables, and seconds of the first two steps."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, batch = CASES[name]
    net, images, labels = make(), torch.rand(batch, 8, 8), torch.randint(0, 10, (batch,))
    steps, executables, first_s = {}, {}, {}
    for way, (build, compiled) in WAYS.items():
        before, started = dynaxla.read_metrics().compiles, time.perf_counter()
        steps[way] = build(copy.deepcopy(net), _compile if compiled else _leave)
        for _ in range(2):
            steps[way](images, labels)
        first_s[way] = time.perf_counter() - started
        executables[way] = dynaxla.read_metrics().compiles - before
    rounds: dict[str, list[float]] = {way: [] for way in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds[PIECES]) < 5:
        for way, step in steps.items():
            started = time.perf_counter()
            step(images, labels)
            rounds[way].append(time.perf_counter() - started)
    return {
        "net": name,
        "parameters": sum(p.numel() for p in net.parameters()),
        "median_ms": {way: 1e3 * statistics.median(times) for way, times in rounds.items()},
        "ratio": {way: _median_ratio(rounds[PIECES], times) for way, times in rounds.items()},
        "executables": executables,
        "first_s": first_s,
    }


def _median_ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def _compile(function: Any, **how: Any) -> Any:
    return torch.compile(function, backend="dynaxla", **how)


def _leave(function: Any, **_: Any) -> Any:
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="measuring time per net")
    parser.add_argument("--json", type=Path, help="write the results there too")
    given = parser.parse_args()
    if unknown := set(given.nets) - set(CASES):
        parser.error(f"unknown net {sorted(unknown)}; choose from {', '.join(CASES)}")
    results = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for name in given.nets or CASES:
            result = measure(name, given.seconds)
            results.append(result)
            print(f"{name}, {result['parameters']} parameters", flush=True)
            for way, ratio in result["ratio"].items():
                made = f"{result['executables'][way]} executables, first two steps {result['first_s'][way]:.1f} s"
                print(f"  {way:11s} {result['median_ms'][way]:9.2f} ms = {ratio:.2f}x   {made}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
