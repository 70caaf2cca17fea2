"""Slices of a tensor at positions known only at run time: one program for all, where static slices need one per
position."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dynaxla::window", mutates_args=())
def window(x: Tensor, starts: Tensor, sizes: list[int]) -> Tensor:
    """Returns the slice of x [...] that starts at starts, int64 [x.dim()], with these sizes; it is within x."""
    for dim, (start, size) in enumerate(zip(starts.tolist(), sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x.clone(memory_format=torch.contiguous_format)


@window.register_fake
def _(x: Tensor, starts: Tensor, sizes: list[int]) -> Tensor:
    return x.new_empty(sizes)


@torch.library.custom_op("dynaxla::window_scatter", mutates_args=())
def window_scatter(x: Tensor, piece: Tensor, starts: Tensor) -> Tensor:
    """Returns x with `piece`, of the same number of dims, written at starts, int64 [x.dim()]; it is within x."""
    result = x.clone(memory_format=torch.contiguous_format)
    target = result
    for dim, (start, size) in enumerate(zip(starts.tolist(), piece.shape, strict=True)):
        target = target.narrow(dim, start, size)
    target.copy_(piece)
    return result


@window_scatter.register_fake
def _(x: Tensor, piece: Tensor, starts: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


WINDOW = torch.ops.dynaxla.window.default
WINDOW_SCATTER = torch.ops.dynaxla.window_scatter.default
