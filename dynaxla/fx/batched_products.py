"""Products of stacks of matrices keep the two dims of a stack apart, so that a program can be partitioned along either.

Attention of several heads merges batch and heads for `bmm`. Where the heads are split over devices, nothing says how the merged
dim is, and each device would gather all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before
from dynaxla.torch_api.aot import PART_OF_JOINT
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import expression

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_TRANSPOSES = (aten.transpose.int, aten.permute.default)


def keep_stacks_apart(graph: Graph) -> None:
    """Makes `bmm` of two tensors [b * c, ...] that are views of [b, c, ...] a product of these."""
    for node in list(graph.find_nodes(op="call_function", target=aten.bmm.default)):
        left, right = (_find_stack(operand) for operand in node.args)
        if left is None or right is None or _shape(left[0])[:2] != _shape(right[0])[:2]:
            continue
        operands = [_turn(graph, node, *found) for found in (left, right)]
        product = _call(graph, node, internal.BATCHED_PRODUCT, tuple(operands))
        for user in list(node.users):
            if user.target in _VIEWS and _shape(user) == _shape(product):
                user.replace_all_uses_with(product)
                graph.erase_node(user)
        if node.users:
            merged = _call(graph, node, aten.view.default, (product, list(node.meta["val"].shape)))
            node.replace_all_uses_with(merged)
        graph.erase_node(node)


def _find_stack(node: Any) -> tuple[Node, bool] | None:
    """The tensor [b, c, ...] of which a stack [b * c, ...] is a view, and whether its matrices are transposed."""
    is_turned = node.target in _TRANSPOSES and _turns_matrices(node)
    view = node.args[0] if is_turned else node
    if view.target not in _VIEWS:
        return None
    source: Node = view.args[0]
    apart, merged = _shape(source), _shape(view)
    if len(apart) == 4 and merged == [apart[0] * apart[1], *apart[2:]]:
        return source, is_turned
    return None


def _turns_matrices(node: Node) -> bool:
    if node.target is aten.permute.default:
        return [dim % 3 for dim in node.args[1]] == [0, 2, 1]  # type: ignore[union-attr, operator]
    return node.meta["val"].dim() == 3 and {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]


def _turn(graph: Graph, before: Node, stack: Node, is_turned: bool) -> Node:
    return _call(graph, before, aten.permute.default, (stack, [0, 1, 3, 2])) if is_turned else stack


def _call(graph: Graph, before: Node, op: OpOverload, args: tuple[Any, ...]) -> Node:
    """A call that is of the forward or of the backward as the node behind it is."""
    made = call_before(graph, before, op, args)
    if (tag := before.meta.get(PART_OF_JOINT)) is not None:
        made.meta[PART_OF_JOINT] = tag
    return made


def _shape(node: Node) -> list[Any]:
    return [expression(size) for size in node.meta["val"].shape]
