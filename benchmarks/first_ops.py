"""Measures small models on the device, op by op and compiled: the first pass of a process with an empty cache, and later ones.

    python -m benchmarks.first_ops                      # all models, on the CPU client
    python -m benchmarks.first_ops vit --target PLUGIN  # on a PJRT plugin, by its name or file

Each first pass runs in a process of its own, behind which the compilers are started already; later passes take turns with
torch's CPU. "additions" are ten of ten numbers, "rows" a matrix's 256 rows and their doubles, stacked. The same
as `python -m dynaxla bench benchmarks.first_ops:make_vit ... --backends eager device:mode=eager device`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.model_cases import ModelRequest
from dynaxla.options import require_member

Built = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


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


def add_ten_times(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(10):
        y = y + x
    return y


def stack_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([*x, *[row + row for row in x]])


def make_vit() -> Built:
    return VisionTransformer().eval(), (torch.randn(2, 3, 32, 32),)


def make_graph() -> Built:
    return GraphNetwork().eval(), (torch.randn(40, 32), torch.randint(0, 40, (2, 160)))


def make_t5() -> Built:
    return T5().eval(), (torch.randint(0, 100, (2, 16)), torch.randint(0, 100, (2, 8)))


def make_lstm() -> Built:
    return Lstm().eval(), (torch.randn(4, 20, 32),)


def make_additions() -> Built:
    return add_ten_times, (torch.randn(10),)


def make_rows() -> Built:
    return stack_rows, (torch.randn(256, 64),)


MODELS: Mapping[str, Callable[[], Built]] = {
    "vit": make_vit,
    "graph": make_graph,
    "t5": make_t5,
    "lstm": make_lstm,
    "additions": make_additions,
    "rows": make_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--target", default="cpu", help="as `dynaxla.use` takes it")
    add_run_arguments(parser)
    given = parser.parse_args()
    for name in given.models:
        require_member(name, MODELS, "model")
    texts = ("eager", f"device:mode=eager,target={given.target}", f"device:target={given.target}")
    backends = [BenchBackend.parse(text) for text in texts]
    with BenchSession(given, len(given.models or MODELS)) as session:
        for name in given.models or MODELS:
            session.measure_model(ModelRequest(f"benchmarks.first_ops:{MODELS[name].__name__}"), backends)
    return session.status


if __name__ == "__main__":
    sys.exit(main())
