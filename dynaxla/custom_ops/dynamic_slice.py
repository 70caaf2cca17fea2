"""Windows into a tensor whose place is known at run time alone: a program for all places, where slices have one for each."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dynaxla::window", mutates_args=())
def window(x: Tensor, starts: Tensor, sizes: list[int]) -> Tensor:
    """The part of x [...] that begins at starts, int64 [x.dim()], and has these sizes; it lies inside of x."""
    for dim, (start, size) in enumerate(zip(starts.tolist(), sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x.clone(memory_format=torch.contiguous_format)


@window.register_fake
def _(x: Tensor, starts: Tensor, sizes: list[int]) -> Tensor:
    return x.new_empty(sizes)


@torch.library.custom_op("dynaxla::window_scatter", mutates_args=())
def window_scatter(x: Tensor, piece: Tensor, starts: Tensor) -> Tensor:
    """x with `piece`, of as many dims, in the place that begins at starts, int64 [x.dim()]; it lies inside of x."""
    made = x.clone(memory_format=torch.contiguous_format)
    place = made
    for dim, (start, size) in enumerate(zip(starts.tolist(), piece.shape, strict=True)):
        place = place.narrow(dim, start, size)
    place.copy_(piece)
    return made


@window_scatter.register_fake
def _(x: Tensor, piece: Tensor, starts: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


WINDOW = torch.ops.dynaxla.window.default
WINDOW_SCATTER = torch.ops.dynaxla.window_scatter.default
