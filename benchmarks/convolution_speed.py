"""Measures convolutions, compiled and in eager: results alone, and with all gradients.

    python -m benchmarks.convolution_speed [--sizes BATCH,CHANNELS,SIDE,GROUPS ...] [--window 3]
        [--patches BATCH,CHANNELS,OUTPUTS,SIDE,WINDOW ...]

Those of `--sizes` are between two of 1 x 1; those of `--patches` are alone, and their windows lie side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

SIZES = ("1,128,56,32", "1,256,28,32", "1,512,14,32", "8,64,56,8", "8,64,56,2", "8,64,56,1")
PATCHES = ("1,3,768,224,16", "8,3,768,224,16", "8,3,96,224,4", "8,192,384,28,2")
Compute = Callable[[nn.Module, torch.Tensor], object]


def infer(net: nn.Module, x: torch.Tensor) -> object:
    with torch.no_grad():
        return net(x)


def train(net: nn.Module, x: torch.Tensor) -> object:
    wanted = [each for each in (x, *net.parameters()) if each.requires_grad]
    return torch.autograd.grad(net(x).square().mean(), wanted)


def run(net: nn.Module, x: torch.Tensor, compute: Compute) -> Run:
    return lambda number: compute(net, x)


def run_compiled(net: nn.Module, x: torch.Tensor, compute: Compute) -> Run:
    return run(torch.compile(net, backend="dynaxla", dynamic=False), x, compute)  # type: ignore[arg-type]


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for sizes in given.sizes:
        batch, channels, side, groups = map(int, sizes.split(","))
        middle = nn.Conv2d(channels, channels, given.window, padding="same", groups=groups)
        net = nn.Sequential(nn.Conv2d(64, channels, 1), nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(channels, 64, 1))
        yield from cases_of(sizes, net, torch.randn(batch, 64, side, side))
    for sizes in given.patches:
        batch, channels, outputs, side, window = map(int, sizes.split(","))
        net = nn.Conv2d(channels, outputs, window, stride=window)
        yield from cases_of(f"patches {sizes}", net, torch.randn(batch, channels, side, side, requires_grad=True))


def cases_of(name: str, net: nn.Module, x: torch.Tensor) -> Iterator[Case]:
    for what, compute in (("results", infer), ("gradients", train)):
        ways = {"eager": partial(run, net, x, compute), "dynaxla": partial(run_compiled, net, x, compute)}
        yield Case(f"{name}, {what}", ways)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="batch, channels, height and width, groups")
    what = "batch, channels, outputs, height and width, those of the window"
    parser.add_argument("--patches", nargs="*", default=PATCHES, help=what)
    parser.add_argument("--window", type=int, default=3, help="height and width of the window")


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
