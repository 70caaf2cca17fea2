"""The `backward` of users' autograd functions, and hooks on gradients, in a graph of Dynamo's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.register_hook import register_hook_op
from torch.fx import Graph, GraphModule, Node

from dynaxla.torch_api.fakes import captured_value, memory_of
from dynaxla.torch_api.graph_writes import find_parts, is_plain


def tie_own_gradients(module: GraphModule) -> None:
    """Makes each gradient x of a user's `backward` or hook read those that come to it: `torch.where(g.sum() != 0, x, x)`.

    A loss that computes its gradient in the forward reads none, nor does a hook that returns ones. Nothing else in a graph of a
    backward says to which gradients such code answers.

    Relies on `autograd_function_apply(forward, backward, *inputs, non_differentiable_idx=)` and `register_hook(x, body)`, whose
    first operands are `get_attr` nodes of graphs, and on the backward's first inputs being the gradients of the forward's
    first results.
    """
    for owner in find_parts(module):
        for node in owner.graph.find_nodes(op="call_function", target=autograd_function_apply):
            forward, backward = (_body(owner, each) for each in node.args[:2])
            others = node.kwargs["non_differentiable_idx"]
            _tie(backward, [i for i in range(len(_results(forward))) if i not in others])
        for node in owner.graph.find_nodes(op="call_function", target=register_hook_op):
            _tie(_body(owner, node.args[1]), [0])


def hide_own_views(module: GraphModule) -> None:
    """Has AOTAutograd not see that what a user's function gives is its operand, or a view of it, where that is no input.

    Of a result of the graph that is one, beside the operand, it makes the view again of the operand, and drops the `backward`:
    of `y = x * 2; return y, Reversed.apply(y)` the gradient is not reversed. Of views of inputs it knows that they are of a
    function. A write to the operand is no reason to see the view: eager raises where the view is used after it.

    Relies on `autograd_function_apply` as `tie_own_gradients` does, and on `_unsafe_view`, which is no view to autograd.
    """
    given = (captured_value(node) for node in module.graph.find_nodes(op="placeholder"))
    inputs = {memory_of(value) for value in given if is_plain(value)}
    for owner in find_parts(module):
        for node in owner.graph.find_nodes(op="call_function", target=autograd_function_apply):
            operands = {memory_of(value) for each in node.args[2:] if is_plain(value := _value(each))}
            _hide_views(_body(owner, node.args[0]), operands - inputs)


def _hide_views(body: GraphModule, memory: Collection[int]) -> None:
    """Hides that results of a graph are views of tensors of this memory."""
    output = body.graph.output_node()
    views = [each for each in _results(body) if is_plain(value := _value(each)) and memory_of(value) in memory]
    for each in dict.fromkeys(views):  # in order, as the key of a stored capture has it
        with body.graph.inserting_before(output):
            sizes = body.graph.call_method("size", (each,))
            hidden = body.graph.call_function(torch.ops.aten._unsafe_view.default, (each, sizes))
        output.replace_input_with(each, hidden)
    if views:
        body.recompile()


def _results(body: GraphModule) -> Sequence[Any]:
    """What the forward of a user's function gives; what it saves follows."""
    returned: Any = body.graph.output_node().args[0]
    return returned[0]  # type: ignore[no-any-return]


def _value(operand: Any) -> Any:
    return captured_value(operand) if isinstance(operand, Node) else None


def _body(owner: GraphModule, node: Any) -> GraphModule:
    body: GraphModule = getattr(owner, node.target)
    return body


def _tie(body: GraphModule, positions: Sequence[int]) -> None:
    """Ties the results of a graph that read none of these inputs to them."""
    output, inputs = body.graph.output_node(), body.graph.find_nodes(op="placeholder")
    given = [inputs[i] for i in positions if i < len(inputs) and _is_differentiable(inputs[i])]
    reading = _find_readers(body.graph, given)
    results: Any = output.args[0]
    listed = results if isinstance(results, (tuple, list)) else (results,)
    free = [each for each in listed if isinstance(each, Node) and each not in reading and _is_differentiable(each)]
    if not free or not given or len({captured_value(each).device for each in (*free, *given)}) > 1:
        return  # autograd refuses a gradient of another device
    with body.graph.inserting_before(output):
        sums = [body.graph.call_function(torch.sum, (each,)) for each in given]
        whether = body.graph.call_function(torch.ne, (sums[0], 0))
        for each in sums[1:]:
            other = body.graph.call_function(torch.ne, (each, 0))
            whether = body.graph.call_function(torch.logical_or, (whether, other))
        for each in dict.fromkeys(free):
            tied = body.graph.call_function(torch.where, (whether, each, each))
            output.replace_input_with(each, tied)
    body.recompile()


def _find_readers(graph: Graph, given: Sequence[Node]) -> set[Node]:
    reading = set(given)
    for node in graph.nodes:
        if not reading.isdisjoint(node.all_input_nodes):
            reading.add(node)
    return reading


def _is_differentiable(node: Node) -> bool:
    """Whether a node is a tensor that can be a gradient. What is given for a result that is none is None."""
    value = captured_value(node)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
