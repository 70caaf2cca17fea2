"""Products of a linear layer and its gradients keep the dims of their rows apart: XLA's TPU compiler fuses what reads a
product, a sum over its columns for one, only where no reshape stands between the two, and copies merged rows where the tokens
are no multiple of eight.

torch makes a linear layer on [batch, tokens, features] a product of [batch * tokens, features], the gradient of its weight a
product over [batch * tokens], and that of its bias a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.symbols import expression

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def keep_rows_apart(graph: Graph) -> None:
    """Makes `mm(view(x), w)` and `addmm(b, view(x), w)`, whose x has more than two dims, a product of x; `mm(t(view(x)),
    view(y))` a contraction of x and y, and `sum(view(x), 0)` a sum of x."""
    for node in list(graph.nodes):
        if node.target is aten.sum.dim_IntList:
            _rewrite_sum(graph, node)
        elif node.target is aten.mm.default and not _rewrite_contraction(graph, node):
            _rewrite_product(graph, node, node.args[0], node.args[1], None)
        elif node.target is aten.addmm.default and not node.kwargs and node.args[0].meta["val"].dim() == 1:
            _rewrite_product(graph, node, node.args[1], node.args[2], node.args[0])


def _rewrite_product(graph: Graph, node: Node, rows: Any, weight: Node, bias: Node | None) -> None:
    source = _before_merging(rows)
    if source is None or not node.meta["val"].is_floating_point():
        return
    weight = call_before(graph, node, aten.permute.default, (weight, [1, 0]))
    product = call_before(graph, node, internal.LINEAR, (source, weight, bias))
    for user in list(node.users):
        if user.target in _VIEWS and _shape(user) == _shape(product):
            user.replace_all_uses_with(product)
            graph.erase_node(user)
    if node.users:
        merged = call_before(graph, node, aten.view.default, (product, list(node.meta["val"].shape)))
        node.replace_all_uses_with(merged)
    graph.erase_node(node)


def _rewrite_contraction(graph: Graph, node: Node) -> bool:
    """Whether a product was one over merged rows, and is one over rows that are apart."""
    left: Any = node.args[0]
    if not _is_transpose(left) or not node.meta["val"].is_floating_point():
        return False
    sources = _before_merging(left.args[0]), _before_merging(node.args[1])
    if sources[0] is None or sources[1] is None or _shape(sources[0])[:-1] != _shape(sources[1])[:-1]:
        return False
    node.replace_all_uses_with(call_before(graph, node, internal.CONTRACT_ROWS, sources))
    graph.erase_node(node)
    return True


def _rewrite_sum(graph: Graph, node: Node) -> None:
    source, dims = _before_merging(node.args[0]), node.args[1]
    if source is None or dims != [0] or not node.meta["val"].is_floating_point():
        return
    total = call_before(graph, node, aten.sum.dim_IntList, (source, list(range(len(_shape(source)) - 1))), node.kwargs)
    shaped = call_before(graph, node, aten.view.default, (total, list(node.meta["val"].shape)))
    node.replace_all_uses_with(shaped)
    graph.erase_node(node)


def _is_transpose(node: Node) -> bool:
    if node.target is aten.t.default:
        return True
    return node.target is aten.permute.default and node.args[1] == [1, 0]


def _before_merging(node: Any) -> Node | None:
    """The tensor [..., rows, k] of which a matrix [... * rows, k] is a view, or None."""
    if node.target not in _VIEWS:
        return None
    source: Node = node.args[0]
    apart = _shape(source)
    return source if len(apart) > 2 and apart[-1] == _shape(node)[-1] else None


def _shape(node: Node) -> list[Any]:
    return [expression(size) for size in node.meta["val"].shape]


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    keep_rows_apart(graph.module.graph)
    return graph


PASS = Pass(
    "unmerged_linear",
    _run,
    "products of linear layers and their gradients keep the dims of their rows apart: XLA's TPU compiler fuses no reader of a "
    "product past a reshape",
    pays_on=lambda target: target.fuses_short_of_reshapes,
)
