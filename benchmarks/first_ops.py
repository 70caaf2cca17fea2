"""Measures small models on the device, op by op and compiled: the first pass of a process with an empty cache, and later ones.

    python -m benchmarks.first_ops                      # all models, on the CPU client
    python -m benchmarks.first_ops vit --target PLUGIN  # on a PJRT plugin, by its name or file

Each model and mode runs in a process of its own. Prints seconds of the first pass, what of it was spent on lowering and in XLA,
the number of programs, and the median of later passes in milliseconds; then what ten additions of ten numbers cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dynaxla

MODES = ("op by op", "compiled")
PASSES = 30


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Four blocks of width 64 on images of 32 x 32 in patches of 8 x 8."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])  # type: ignore[no-any-return]


class GraphNetwork(nn.Module):
    """Three layers of messages, each the mean over a node's edges."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.zeros(x.shape[0], device=x.device).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([x[source], x[target]], 1)).relu()
            mean = torch.zeros_like(x).index_add(0, target, sent) / degree.clamp(min=1).unsqueeze(1)
            x = x + update(torch.cat([x, mean], 1)).tanh()
        return x.mean(0)


class T5(nn.Module):
    """Two layers of encoder and decoder, 16 and 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
        self.model = T5ForConditionalGeneration(config)

    def forward(self, read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=read, decoder_input_ids=written, use_cache=False).logits  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """Two layers of 64, 20 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "vit": lambda: (VisionTransformer(), (torch.randn(2, 3, 32, 32),)),
    "graph": lambda: (GraphNetwork(), (torch.randn(40, 32), torch.randint(0, 40, (2, 160)))),
    "t5": lambda: (T5(), (torch.randint(0, 100, (2, 16)), torch.randint(0, 100, (2, 8)))),
    "lstm": lambda: (Lstm(), (torch.randn(4, 20, 32),)),
}


def median_ms(run: Callable[[], Any]) -> float:
    """The median over `PASSES`, in milliseconds."""
    times = []
    for _ in range(PASSES):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


@torch.no_grad()
def measure(name: str, mode: str, target: str) -> dict[str, float]:
    """What a model costs in this process, which has computed nothing."""
    dynaxla.use(target)
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    expected = model(*inputs)
    model.to("dynaxla")
    given = [each.to("dynaxla") for each in inputs]
    function = torch.compile(model, backend="dynaxla") if mode == "compiled" else model
    before, started = dynaxla.read_metrics(), time.perf_counter()
    first = function(*given).cpu()
    first_s, after = time.perf_counter() - started, dynaxla.read_metrics()
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-3)
    return {
        "first_s": first_s,
        "lowering_s": after.lowering_s - before.lowering_s,
        "compile_s": after.compile_s - before.compile_s,
        "programs": after.compiles + after.folds - before.compiles - before.folds,
        "later_ms": median_ms(lambda: function(*given).cpu()),
    }


@torch.no_grad()
def measure_additions(target: str) -> dict[str, float]:
    """Ten additions of ten numbers and the read of the last."""
    dynaxla.use(target)
    x = torch.randn(10).to("dynaxla")

    def add() -> None:
        y = x
        for _ in range(10):
            y = y + x
        y.cpu()

    add()
    return {"later_ms": median_ms(add)}


def run_apart(*arguments: str) -> dict[str, float]:
    """Measures in another process, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.first_ops", "--child", *arguments]
        done = subprocess.run(
            command, env={**os.environ, "DYNAXLA_CACHE_DIR": folder}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--target", default="cpu", help="as `dynaxla.use` takes it")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        made = measure_additions(given.target) if len(given.models) < 2 else measure(*given.models, given.target)
        print(json.dumps(made))
        return
    print(f"{'':8}{'':10}{'first, s':>10}{'lowering':>10}{'XLA':>8}{'programs':>10}{'later, ms':>11}")
    for name in given.models or MODELS:
        for mode in MODES:
            made = run_apart(name, mode, "--target", given.target)
            print(
                f"{name:8}{mode:10}{made['first_s']:>10.2f}{made['lowering_s']:>10.2f}{made['compile_s']:>8.2f}"
                f"{made['programs']:>10.0f}{made['later_ms']:>11.2f}",
                flush=True,
            )
    print(f"ten additions: {run_apart('--target', given.target)['later_ms']:.2f} ms")


if __name__ == "__main__":
    main()
