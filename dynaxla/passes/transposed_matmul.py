"""Products with a transposed matrix read the matrix where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import replace
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext

aten = torch.ops.aten


def rewrite_transposed_matmuls(graph: Graph) -> None:
    """Products with a transposed matrix read the matrix as it lies: XLA's CPU compiler otherwise copies the transposed one at
    every call of a product of one row."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            _rewrite_product(graph, node, node.args[0], node.args[1], None)
        elif node.target is aten.addmm.default and not node.kwargs:
            _rewrite_product(graph, node, node.args[1], node.args[2], node.args[0])


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


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    rewrite_transposed_matmuls(graph.module.graph)
    return graph


PASS = Pass(
    "transposed_matmul",
    _run,
    "`mm(x, t(w))` and `addmm` of floats read the weight where it lies: XLA's CPU compiler else copies the transposed weight "
    "at every call of a product of one row",
    pays_on=lambda target: target.copies_transposed,
)
