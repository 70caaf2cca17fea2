"""Numbers of Python's `random` that a compiled function draws.

Dynamo draws them at every call, passes them to its graph as tensors, and predicts float32 for a float, but passes float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import RandomValueSource
from torch.fx import GraphModule, Node


def take_full_precision(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Lets a graph of Dynamo's take the floats that it draws as float64.

    Within they are rounded to float32, as eager's kernels round a number beside float32; beside a float64 input none is.
    Relies on `_dynamo_source` of placeholders and on `RandomValueSource`.

    Returns:
        the inputs of the call that is captured, with the drawn ones as float64.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    drawn = {i: node for i, node in enumerate(placeholders) if _is_drawn(node) and inputs[i].is_floating_point()}
    if not drawn:
        return inputs
    others = [x for i, x in enumerate(inputs) if i not in drawn and isinstance(x, torch.Tensor)]
    if not any(x.dtype is torch.float64 for x in others):
        _round(module, list(drawn.values()))
    return [x.double() if i in drawn else x for i, x in enumerate(inputs)]


def _is_drawn(node: Node) -> bool:
    return isinstance(getattr(node, "_dynamo_source", None), RandomValueSource)


def _round(module: GraphModule, numbers: Sequence[Node]) -> None:
    """What the graph returns of the numbers stays as it is: Python gets it back."""
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    for number in numbers:
        with module.graph.inserting_before(first):
            rounded = module.graph.call_method("to", (number, torch.float32))
        rounded.meta = {"example_value": number.meta["example_value"]}
        number.meta["example_value"] = number.meta["example_value"].double()
        for user in list(number.users):
            if user is not rounded and user.op != "output":
                user.replace_input_with(number, rounded)
    module.recompile()
