"""The gradient of max pooling finds the maxima again, where nothing else reads their indices.

As torch has it, the forward keeps an int64 for every maximum, and the backward adds each gradient at its index. A scatter
takes a TPU's compiler minutes, and its program reads and writes three times as much as one that searches the windows again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.max_pool_gradient import MAX_POOL2D_GRADIENT, MAX_POOL3D_GRADIENT
from dynaxla.fx.edit import replace
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.overloads import OpOverload, parameters

aten = torch.ops.aten
_GRADIENTS: dict[OpOverload, tuple[OpOverload, OpOverload]] = {
    aten.max_pool2d_with_indices_backward.default: (aten.max_pool2d_with_indices.default, MAX_POOL2D_GRADIENT),
    aten.max_pool3d_with_indices_backward.default: (aten.max_pool3d_with_indices.default, MAX_POOL3D_GRADIENT),
}


def find_maxima_again(graph: Graph) -> None:
    """Replaces gradients that read the indices of a pooling in the same graph by ones that read the images alone."""
    for backward, (pool, gradient) in _GRADIENTS.items():
        for node in graph.find_nodes(op="call_function", target=backward):
            *others, indices = node.args
            if _are_indices_for(indices, pool, others[1:]) and all(
                user.target is backward or _is_unused(user) for user in indices.users
            ):
                replace(graph, node, gradient, tuple(others))


def _are_indices_for(node: object, pool: OpOverload, settings: Sequence[object]) -> bool:
    """Whether a node is the indices of a pooling of the same images by the same settings."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 1:
        return False
    pooled = node.args[0]
    if not isinstance(pooled, Node) or pooled.target is not pool:
        return False
    given = [*pooled.args, *(each.default_value for each in parameters(pool)[len(pooled.args) :])]
    return [pooled.kwargs.get(p.name, value) for p, value in zip(parameters(pool), given, strict=True)] == [*settings]


def _is_unused(node: Node) -> bool:
    """Whether a node computes what nothing reads, as the squeezed indices of a pooling of one dim."""
    return node.op == "call_function" and not node.users and not node.is_impure()


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    find_maxima_again(graph.module.graph)
    return graph


PASS = Pass(
    "pooled_maxima", _run, "gradients of max pooling find the maxima again where nothing else reads their indices"
)
