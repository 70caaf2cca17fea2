"""The `backward` of users' autograd functions, and hooks on gradients, in a graph of Dynamo's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.register_hook import register_hook_op
from torch.fx import Graph, GraphModule, Node


def tie_own_gradients(module: GraphModule) -> None:
    """Makes each gradient x of a user's `backward` or hook read those that come to it: `torch.where(g.sum() != 0, x, x)`.

    A loss that computes its gradient in the forward reads none, nor does a hook that returns ones. Nothing else in a graph of a
    backward says to which gradients such code answers.

    Relies on `autograd_function_apply(forward, backward, *inputs, non_differentiable_idx=)` and `register_hook(x, body)`, whose
    first operands are `get_attr` nodes of graphs, and on the backward's first inputs being the gradients of the forward's
    first results.
    """
    for owner in [each for each in module.modules() if isinstance(each, GraphModule)]:
        for node in owner.graph.find_nodes(op="call_function", target=autograd_function_apply):
            forward, backward = (_body(owner, each) for each in node.args[:2])
            results: Any = forward.graph.output_node().args[0]
            others = node.kwargs["non_differentiable_idx"]
            _tie(backward, [i for i in range(len(results[0])) if i not in others])
        for node in owner.graph.find_nodes(op="call_function", target=register_hook_op):
            _tie(_body(owner, node.args[1]), [0])


def _body(owner: GraphModule, node: Any) -> GraphModule:
    body: GraphModule = getattr(owner, node.target)
    return body


def _tie(body: GraphModule, positions: Sequence[int]) -> None:
    """Ties the results of a graph that read none of these inputs to them."""
    output, inputs = body.graph.output_node(), body.graph.find_nodes(op="placeholder")
    given = [inputs[i] for i in positions]
    reading = _find_readers(body.graph, given)
    results: Any = output.args[0]
    listed = results if isinstance(results, (tuple, list)) else (results,)
    free = {each for each in listed if isinstance(each, Node) and each not in reading and _is_tensor(each)}
    if not free or not given:
        return
    with body.graph.inserting_before(output):
        sums = [body.graph.call_function(torch.sum, (each,)) for each in given]
        whether = body.graph.call_function(torch.ne, (sums[0], 0))
        for each in sums[1:]:
            other = body.graph.call_function(torch.ne, (each, 0))
            whether = body.graph.call_function(torch.logical_or, (whether, other))
        for each in free:
            tied = body.graph.call_function(torch.where, (whether, each, each))
            output.replace_input_with(each, tied)
    body.recompile()


def _find_readers(graph: Graph, given: Sequence[Node]) -> set[Node]:
    reading = set(given)
    for node in graph.nodes:
        if not reading.isdisjoint(node.all_input_nodes):
            reading.add(node)
    return reading


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
