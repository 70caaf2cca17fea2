"""Batch normalization of a convolution's result, moved into the convolution's own weights where both are fixed.

With s = weight / sqrt(var + eps): norm(conv(x, w, b)) = conv(x, s w, s (b - mean) + bias). In float32 and float64 the two
differ by rounding alone; a 16-bit float would round the scaled weights, so there the norm stays. The products depend on
weights alone and are computed once per weight version.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from dynaxla.fx.edit import call_before
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.float64)


def fold_batch_norms(graph: Graph, weights: Collection[Node]) -> None:
    """Rewrites a functional graph in place; `weights` are the placeholders that keep their values between calls."""
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit_no_training.default and _is_foldable(node, weights):
            _fold(graph, node)


def _is_foldable(norm: Node, weights: Collection[Node]) -> bool:
    convolution, *parameters = norm.args[:5]
    if not isinstance(convolution, Node) or convolution.target is not aten.convolution.default:
        return False
    if list(convolution.users) != [norm] or convolution.args[6] or convolution.meta["val"].dtype not in _DTYPES:
        return False
    fixed = [*parameters, *convolution.args[1:3]]
    only_first = all(user.target is operator.getitem and user.args[1] == 0 for user in norm.users)
    return only_first and all(p is None or p in weights for p in fixed)


def _fold(graph: Graph, norm: Node) -> None:
    convolution, weight, bias, mean, var, _, eps = norm.args
    assert isinstance(convolution, Node)
    x, kernel, start, *settings = convolution.args

    def call(target: OpOverload, *args: Argument) -> Node:
        return call_before(graph, norm, target, args)

    scale = call(aten.rsqrt.default, call(aten.add.Scalar, var, eps))
    if weight is not None:
        scale = call(aten.mul.Tensor, scale, weight)
    ones = [1] * (kernel.meta["val"].dim() - 1)  # type: ignore[union-attr]
    scaled = call(aten.mul.Tensor, kernel, call(aten.view.default, scale, [-1, *ones]))
    shift = call(aten.neg.default, mean) if start is None else call(aten.sub.Tensor, start, mean)
    shift = call(aten.mul.Tensor, shift, scale)
    if bias is not None:
        shift = call(aten.add.Tensor, shift, bias)
    folded = call(aten.convolution.default, x, scaled, shift, *settings)
    for user in list(norm.users):
        user.replace_all_uses_with(folded)
        graph.erase_node(user)
    graph.erase_node(norm)
    graph.erase_node(convolution)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if context.options.fold_parameters:
        fold_batch_norms(graph.module.graph, graph.weights)
    return graph


PASS = Pass(
    "batch_norm_folding",
    _run,
    "a batch norm with fixed statistics behind a convolution with fixed weights is part of these (float32 and float64)",
)
