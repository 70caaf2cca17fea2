"""Convolutions get channels last, and their weights' new layout is an op of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before, replace
from dynaxla.ops.channels_last import has_small_columns
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext

aten = torch.ops.aten


def rewrite_convolutions(graph: Graph, weights: Collection[Node] = ()) -> None:
    """Convolutions get channels last, and their weights' new layout is an op of its own.

    Args:
        weights: the placeholders that keep their values for many calls.
    """
    kept = _find_kept(graph, weights)
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if not _is_by_columns(node, kept):
            _rewrite_convolution(graph, node)


def _find_kept(graph: Graph, weights: Collection[Node]) -> set[Node]:
    """The weights, and what is computed from them alone, so that it lasts as long."""
    kept = set(weights)
    for node in graph.nodes:
        if node.all_input_nodes and kept.issuperset(node.all_input_nodes):
            kept.add(node)
    return kept


def _is_by_columns(node: Node, kept: Collection[Node]) -> bool:
    """Whether the op's body, which reads the weight as it is, computes the same faster."""
    weight, padding, groups, value = node.args[1], node.args[4], node.args[8], node.meta["val"]
    if value.dtype not in (torch.float32, torch.float64):
        return False
    shape = weight.meta["val"].shape  # type: ignore[union-attr]
    sizes = [value.shape[0], *value.shape[2:]]
    places = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else sys.maxsize
    fixed = all(isinstance(size, int) for size in shape)
    return fixed and has_small_columns(places, shape, padding, groups, is_permuted=weight in kept)  # type: ignore[arg-type]


def _rewrite_convolution(graph: Graph, node: Node) -> None:
    """Channels last between convolutions: XLA's CPU convolution is 1.3 to 2.8 times as fast, and its layout
    assignment turns the transposes between two of them into bitcasts."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    value: torch.Tensor = x.meta["val"]  # type: ignore[union-attr]
    dims, channels = value.dim(), value.shape[1]
    has_none = isinstance(channels, int) and channels == 0  # of which torch makes no channels
    if transposed or has_none or dims not in (3, 4, 5) or not value.is_floating_point():
        return
    last = [0, *range(2, dims), 1]
    first = [0, dims - 1, *range(1, dims - 1)]
    kernel = call_before(graph, node, internal.KERNEL, (weight,))
    moved = call_before(graph, node, aten.permute.default, (x, last))
    settings = (_per_dim(value, dims - 2) for value in (stride, padding, dilation))
    result = call_before(graph, node, internal.CONVOLUTION, (moved, kernel, bias, *settings, groups))
    back = call_before(graph, node, aten.permute.default, (result, first))
    # The clone stands for torch's memory format; it costs nothing in XLA, which knows no strides.
    replace(graph, node, aten.clone.default, (back,), {"memory_format": _memory_format(node.meta["val"])})


def _memory_format(result: torch.Tensor) -> torch.memory_format:
    """What torch gives a convolution: row-major, or channels last as the permuted result has them already.

    Its sizes may vary, so its strides are not compared, which would guard them: the innermost one is the number 1.
    """
    innermost = result.stride(-1)
    return torch.contiguous_format if isinstance(innermost, int) and innermost == 1 else torch.preserve_format


def _per_dim(values: Any, dims: int) -> list[Any]:
    """ATen takes one value for all dims too."""
    return list(values) * dims if len(values) == 1 else list(values)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    is_folded = graph.kind == "inference" and context.options.fold_parameters
    rewrite_convolutions(graph.module.graph, graph.weights if is_folded else ())
    return graph


PASS = Pass(
    "channels_last_convolution",
    _run,
    "a convolution of floats that is not transposed has channels last, unless it is one product with the weight as it is; "
    "the weight's new layout is an op of its own, run once per weight version",
    pays_on=lambda target: target.channels_last,
)
