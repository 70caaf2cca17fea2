"""Inputs that a graph of Dynamo's gives memory, `x.data = y`."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _get_data_attr  # type: ignore[attr-defined]
from torch.fx import GraphModule, Node

from dynaxla.torch_api.fakes import captured_value

_TAKES_VERSION_BACK = "_lower_version_count_by_1"  # a local function of Dynamo's


def drop_own_memory(module: GraphModule) -> None:
    """Removes `x.data = x.to(...)` of inputs, where the conversion gives `x` itself. `layer.to(x.device)` in a forward is one
    for each parameter, though the layer is there already."""
    graph, is_changed = module.graph, False
    for node in graph.find_nodes(op="call_function", target=torch.Tensor.set_):
        if not _gives_itself(node):
            continue
        for user in list(node.users):
            if getattr(user.target, "__name__", "") == _TAKES_VERSION_BACK:
                graph.erase_node(user)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        is_changed = True
    if is_changed:
        module.recompile()


def _gives_itself(node: Node) -> bool:
    given, *values = node.args
    if not isinstance(given, Node) or given.op != "placeholder" or len(values) != 1:
        return False
    value: Any = values[0]
    while isinstance(value, Node) and value is not given and _is_no_conversion(value, captured_value(given)):
        value = value.args[0]
    return value is given


def _is_no_conversion(node: Node, given: Any) -> bool:
    """Whether a call gives its tensor, which is like `given`, or another one of the same memory."""
    if node.target is _get_data_attr:
        return True
    if node.op != "call_method" or node.target != "to" or not node.kwargs.keys() <= {"device", "dtype", "non_blocking"}:
        return False
    return all(_is_like(option, given) for option in (*node.args[1:], *node.kwargs.values()))


def _is_like(option: Any, given: torch.Tensor) -> bool:
    """Whether an argument of `to` asks for nothing that the tensor has not."""
    if isinstance(option, Node):
        other = captured_value(option)
        return isinstance(other, torch.Tensor) and (other.device, other.dtype) == (given.device, given.dtype)
    if isinstance(option, (torch.device, str)):
        return torch.device(option) == given.device
    return option is None or option is False or option is given.dtype
