"""Rewrites of the captured ATen graph in place: same values, forms that XLA runs well."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before, replace

aten = torch.ops.aten


def rewrite_products(graph: Graph) -> None:
    """Products with a transposed matrix read the matrix as it lies: XLA's CPU compiler otherwise copies the transposed one at
    every call of a product of one row."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            _rewrite_product(graph, node, node.args[0], node.args[1], None)
        elif node.target is aten.addmm.default and not node.kwargs:
            _rewrite_product(graph, node, node.args[1], node.args[2], node.args[0])


def rewrite_convolutions(graph: Graph) -> None:
    """Convolutions get channels last, and their weights' new layout is an op of its own."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        _rewrite_convolution(graph, node)


def _transposed(node: Any) -> Node | None:
    """The matrix that `node` is the transpose of, or None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]:  # type: ignore
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.transpose.int and {d % 2 for d in node.args[1:]} == {0, 1}:  # type: ignore
        return node.args[0]  # type: ignore[return-value]
    return None


def _rewrite_product(graph: Graph, node: Node, left: Any, right: Any, bias: Any) -> None:
    weight = _transposed(right)
    if weight is None or weight.meta["val"].dim() != 2 or not node.meta["val"].is_floating_point():
        return
    replace(graph, node, internal.LINEAR, (left, weight, bias))


def _rewrite_convolution(graph: Graph, node: Node) -> None:
    """Channels last between convolutions: XLA's CPU convolution is 1.3 to 2.8 times as fast, and its layout
    assignment turns the transposes between two of them into bitcasts."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    dims = x.meta["val"].dim()  # type: ignore[union-attr]
    if transposed or dims not in (3, 4, 5) or not node.meta["val"].is_floating_point():
        return
    last = [0, *range(2, dims), 1]
    first = [0, dims - 1, *range(1, dims - 1)]
    kernel = call_before(graph, node, internal.KERNEL, (weight,))
    moved = call_before(graph, node, aten.permute.default, (x, last))
    settings = (_per_dim(value, dims - 2) for value in (stride, padding, dilation))
    result = call_before(graph, node, internal.CONVOLUTION, (moved, kernel, bias, *settings, groups))
    back = call_before(graph, node, aten.permute.default, (result, first))
    # The clone stands for torch's memory format; it costs nothing in XLA, which knows no strides.
    replace(graph, node, aten.clone.default, (back,), {"memory_format": torch.contiguous_format})


def _per_dim(values: Any, dims: int) -> list[Any]:
    """ATen takes one value for all dims too."""
    return list(values) * dims if len(values) == 1 else list(values)
