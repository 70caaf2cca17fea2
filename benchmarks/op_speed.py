"""Measures single ops that XLA's own forms would make slow on the CPU, compiled and in eager: sorts, largest elements, medians,
running sums, distances, trigonometric functions, powers, remainders, ops that are fused with no other one, pooling, samples at
a grid, writes to slices and gradients of slices.

    python -m benchmarks.op_speed [--ops NAME ...] [--sizes ROWS,COLUMNS ...] [--dtypes float32 bfloat16]

A row of 49,152 is what a token is chosen from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

_WIDTH = 8


def pool(x: torch.Tensor, kind: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Pools windows of 3 x 3, at every second element, of images that are rows of x, eight elements wide."""
    return kind(x.unflatten(-1, (-1, _WIDTH)).unsqueeze(1), 3, 2, 1)


def max_places(x: torch.Tensor, window: int) -> torch.Tensor:
    """The largest elements' places in square windows around each element of images that are rows of x, eight elements wide."""
    images = x.unflatten(-1, (-1, _WIDTH)).unsqueeze(1)
    return F.max_pool2d(images, window, 1, window // 2, return_indices=True)[1]


def write_inside(x: torch.Tensor) -> torch.Tensor:
    """Writes to all columns but the first and the last."""
    y = x * 2
    y[:, 1:-1] = x[:, :-2]
    return y


def halves_gradient(x: torch.Tensor) -> torch.Tensor:
    """The gradient of a matrix of which the two halves of each row were read, as rotary embeddings do."""
    half = x.shape[-1] // 2
    pieces = (x[:, :half], 0, half), (x[:, half:], half, x.shape[-1])
    slice_backward = torch.ops.aten.slice_backward.default
    first, last = (slice_backward(piece, list(x.shape), 1, start, end, 1) for piece, start, end in pieces)
    return first + last  # type: ignore[no-any-return]


def sample(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are rows of x, eight elements wide, of up to eight channels, and as many positions, some beside the image."""
    images = x.unflatten(-1, (min(8, x.shape[-1] // _WIDTH), -1, _WIDTH))
    count = torch.arange(images[0, 0].numel())
    grid = torch.stack([count * 37 % 70, count * 29 % 70], -1).to(x.dtype) / 32 - 35 / 32
    return images, grid.view(1, *images.shape[2:], 2).expand(len(x), -1, -1, -1).contiguous()


def grid_sample(x: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(*sample(x), align_corners=False)


def grid_gradient(x: torch.Tensor) -> Any:
    """The gradients of such a sample, by images and by positions."""
    images, grid = sample(x)
    return torch.ops.aten.grid_sampler_2d_backward(images, images, grid, 0, 0, False, [True, True])


def encode_positions(x: torch.Tensor) -> torch.Tensor:
    """Rows of x as sixteen tokens each, to which sines and cosines of their positions are added."""
    tokens = x.unflatten(-1, (16, -1))
    rates = torch.exp(torch.arange(0, tokens.shape[-1], 2) * -0.01)
    angles = torch.arange(16)[:, None] * rates
    return tokens + torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, : tokens.shape[-1]]


def transform_frames(x: torch.Tensor) -> torch.Tensor:
    """The magnitudes of windowed frames of the rows."""
    length = min(256, x.shape[-1] // 2)
    return torch.stft(x, length, window=torch.hann_window(length), return_complex=True).abs()


SIZES = ("8,49152", "1024,768", "4096,8")
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: x.sort(-1)[0],
    "largest": lambda x: x.topk(max(1, x.shape[-1] // 16))[0],
    "largest_of_all": lambda x: x.max(),
    "place_of_largest": lambda x: x.argmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum_of_columns": lambda x: x.cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "median": lambda x: x.median(-1)[0],
    "distances": lambda x: torch.cdist(x[:1024], x[:1024], 1.0),
    "sin": torch.sin,
    "tan": torch.tan,
    "atan2": lambda x: torch.atan2(x, x + 1),
    "encode_positions": encode_positions,
    "transform_frames": transform_frames,
    "pow": lambda x: x.abs() ** 2.5,
    "exp2": torch.exp2,
    "asin": lambda x: torch.asin(x * 0.2),
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "remainder": lambda x: x % 0.7,
    "floor_divide": lambda x: x // 0.7,
    "add": lambda x: x + x,
    "negative": torch.neg,
    "rsqrt": torch.rsqrt,
    "norm": lambda x: x.norm(dim=-1),
    "max_pool": lambda x: pool(x, F.max_pool2d),
    "avg_pool": lambda x: pool(x, F.avg_pool2d),
    "max_pool_3": lambda x: max_places(x, 3),
    "max_pool_13": lambda x: max_places(x, 13),
    "write": write_inside,
    "halves_gradient": halves_gradient,
    "grid_sample": grid_sample,
    "grid_gradient": grid_gradient,
}


def run(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Run:
    return lambda number: function(x)


def run_compiled(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Run:
    return run(torch.compile(function, backend="dynaxla", dynamic=False), x)


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    for dtype in given.dtypes:
        for sizes in given.sizes:
            x = torch.randn([*map(int, sizes.split(","))]).to(getattr(torch, dtype))
            for name in given.ops:
                function = CALLS[name]
                ways = {"eager": partial(run, function, x), "dynaxla": partial(run_compiled, function, x)}
                yield Case(f"{name} {sizes} {dtype}", ways)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=("float32",))


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments)
