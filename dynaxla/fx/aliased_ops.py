"""Ops that are other ops under another name, replaced by these."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before, replace
from dynaxla.torch_api.overloads import OpOverload, family

aten = torch.ops.aten

# transformers' own operators of its mixtures of experts, known by their names alone; the first has the same parameters.
_GROUPED_PRODUCT_ELSEWHERE = "transformers::grouped_mm_fallback"
_ITS_BACKWARD = "transformers::grouped_mm_fallback_backward"


def replace_aliased_ops(graph: Graph) -> None:
    """Replaces ops that are other ops under another name by these: quotients of numbers that torch turned into tensors,
    copies that wait for a write, which torch makes in memory of its own alone, and the grouped products of transformers."""
    for node in list(graph.nodes):
        if node.target is aten.true_divide.Tensor:
            replace(graph, node, aten.div.Tensor, node.args, node.kwargs)
        elif node.target is aten._lazy_clone.default:
            replace(graph, node, aten.clone.default, node.args, node.kwargs)
        elif _is_named(node, _GROUPED_PRODUCT_ELSEWHERE):
            replace(graph, node, internal.GROUPED_PRODUCT, node.args, node.kwargs)
        elif _is_named(node, _ITS_BACKWARD):
            _rewrite_grouped_backward(graph, node)


def _is_named(node: Node, name: str) -> bool:
    return isinstance(node.target, OpOverload) and family(node.target) == name


def _rewrite_grouped_backward(graph: Graph, node: Node) -> None:
    rows, weight, offs, grad = node.args
    for result in list(node.users):  # each takes one of the two gradients
        if result.args[1] == 0:
            turned = call_before(graph, result, aten.permute.default, (weight, [0, 2, 1]))
            replace(graph, result, internal.GROUPED_PRODUCT, (grad, turned, offs))
        else:
            replace(graph, result, internal.GROUP_PRODUCTS, (rows, grad, offs))
