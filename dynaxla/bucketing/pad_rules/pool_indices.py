"""Flat (row-major) indices of elements in an image, as max pooling returns them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.size_expressions import Size

aten = torch.ops.aten


def convert_pool_indices(build: PaddedGraphBuilder, numbers: Node, old: Sequence[Size], new: Sequence[Size]) -> Node:
    """Converts flat indices into images of the sizes `old` to flat indices into images of the sizes `new`."""
    rest, stride = numbers, build.scalar(1)
    result = build.emit(aten.mul.Tensor, numbers, 0)
    for before, after in zip(reversed(old[1:]), reversed(new[1:]), strict=True):
        size = build.scalar(before)
        here = build.emit(aten.mul.Tensor, build.emit(aten.remainder.Tensor, rest, size), stride)
        result = build.emit(aten.add.Tensor, result, here)
        rest = build.emit(aten.div.Tensor_mode, rest, size, rounding_mode="floor")
        stride = build.emit(aten.mul.Tensor, stride, build.scalar(after))
    return build.emit(aten.add.Tensor, result, build.emit(aten.mul.Tensor, rest, stride))
