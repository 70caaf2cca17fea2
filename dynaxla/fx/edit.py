"""Putting calls into a captured graph, and facts about its nodes."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from dynaxla.torch_api import fakes
from dynaxla.torch_api.aot import find_own_backward, is_backward, is_gradient_sum, module_path
from dynaxla.torch_api.overloads import UNSAFE_VIEWS, OpOverload, gives_view
from dynaxla.types import GRADIENT_SUM, IN_PLACE, KEPT_VIEW, MODULE_PATH, OWN_BACKWARD, SOURCE

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_KEPT = (*SOURCE, "seq_nr", "nn_module_stack")


def call_before(
    graph: Graph,
    source: Node,
    target: OpOverload,
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument] | None = None,
) -> Node:
    """A new node in front of `source`, with its user frame and a fake value of its own."""
    with graph.inserting_before(source):
        made = graph.call_function(target, args, kwargs)
    made.meta = {key: value for key, value in source.meta.items() if key in _KEPT}
    operands, settings = torch.fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with _mode(source):
        made.meta["val"] = target(*operands, **settings)
    return made


def insert_before(
    source: Node, target: Any, args: tuple[Argument, ...], kwargs: dict[str, Argument], value: Any
) -> Node:
    """A new node in front of `source`, with its user frame and this fake value, which is known already."""
    with source.graph.inserting_before(source):
        made = source.graph.call_function(target, args, kwargs)
    made.meta = {key: value for key, value in source.meta.items() if key in _KEPT}
    made.meta["val"] = value
    return made


def insert_zeros(source: Node, value: torch.Tensor) -> Node:
    """Zeros of the fixed shape, the dtype and the device of a fake value, in front of `source`."""
    settings: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with fakes.mode_of(value):
        zeros = torch.zeros(value.shape, **settings)
    return insert_before(source, aten.full.default, (list(value.shape), 0), settings, zeros)


def replace(
    graph: Graph,
    node: Node,
    target: OpOverload,
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument] | None = None,
) -> None:
    """Puts a call with the same value in the node's place."""
    with graph.inserting_before(node):
        made = graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def tolerate_strides(graph: Graph) -> None:
    """Lets eager PyTorch run a graph on operands whose strides are not those of the capture: a view of them may be a copy."""
    for node in graph.nodes:
        if node.target in _VIEWS and KEPT_VIEW not in node.meta and IN_PLACE not in node.meta:
            node.target = aten.reshape.default


def mark_modules(module: GraphModule) -> None:
    """Writes the path of the user's module into `meta[MODULE_PATH]` of each node, those of sub-graphs too."""
    for node in (node for each in module.modules() if isinstance(each, GraphModule) for node in each.graph.nodes):
        path = module_path(node)
        node.meta[MODULE_PATH] = f"{path}/backward".lstrip("/") if is_backward(node) else path


def mark_gradients(backward: Graph) -> None:
    """Writes into `meta[OWN_BACKWARD]` which nodes of a backward are of users' own, by calls, from 0, and marks its sums."""
    calls: dict[int, int] = {}
    for node in backward.nodes:
        call = find_own_backward(node)
        if call is not None:
            node.meta[OWN_BACKWARD] = calls.setdefault(call, len(calls))
        if is_gradient_sum(node):
            node.meta[GRADIENT_SUM] = True


def has_memory(node: Node) -> bool:
    """Whether the node's value is a tensor of one memory: a sparse tensor has several, and none of its own."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def memory_of(node: Node) -> int:
    """Names the memory that a tensor lies in; torch's fake tensors share it as those of eager do."""
    return fakes.memory_of(node.meta["val"])


def is_view(node: Node) -> bool:
    """Whether the node is a view of its first operand, or one of the views that an op like split gives."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return is_view(node.args[0])
    return isinstance(node.target, OpOverload) and (gives_view(node.target) or node.target in UNSAFE_VIEWS)


def holds_tensors(node: Node) -> bool:
    """Whether the node's value is a tensor, or a tuple or list with one."""
    value = node.meta.get("val")
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,)))


def _mode(node: Node) -> AbstractContextManager[object]:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return fakes.mode_of(first)
