"""Tensors that a graph of the device makes on the host, of nothing but numbers, are made on the device.

A model may say `torch.arange(n)` without a device, and move what comes of it. On the host each op of that would run in eager,
at every call, and cut the graph; a loop around it would run in eager as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api import fakes
from dynaxla.torch_api.overloads import OpOverload, changes_arguments
from dynaxla.types import DEVICE_TYPE

aten = torch.ops.aten

_FACTORIES = frozenset(
    (
        *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.zeros.default),
        *(aten.ones.default, aten.scalar_tensor.default, aten.linspace.default, aten.eye.default, aten.eye.m),
    )
)


def make_host_constants_on(device: torch.device, module: GraphModule) -> None:
    """Moves them, also in sub-graphs; those that an op of the host asks for, or the graph's caller, stay."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            _move(part.graph, device)


def _move(graph: Graph, device: torch.device) -> None:
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_constant(node, found):
            found[node] = None
    while asked := [node for node in found if any(not (u in found or _is_on(u, device)) for u in node.users)]:
        for node in asked:
            del found[node]
    for node in found:
        if _is_copied_number(node):
            node.target, node.kwargs = aten.scalar_tensor.default, {"dtype": node.meta["val"].dtype}
        if node.target in _FACTORIES or "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])  # type: ignore[misc]
        with fakes.mode_of(node.meta["val"]):
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _is_constant(node: Node, found: dict[Node, None]) -> bool:
    """Whether it is a tensor of the host that is made of numbers, sizes and `found` alone, the same at each call."""
    if not isinstance(node.target, OpOverload) or not _is_tensor_on(node.meta.get("val"), "cpu"):
        return False
    if node.target in _FACTORIES or _is_copied_number(node):
        return True
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    return bool(tensors) and all(each in found for each in tensors) and not draws and not changes_arguments(node.target)


def _is_copied_number(node: Node) -> bool:
    """Whether it makes a tensor of a plain number, as vmap does of every number beside a batched tensor."""
    return node.target is aten._to_copy.default and isinstance(node.args[0], (int, float, complex))


def _is_on(node: Node, device: torch.device) -> bool:
    value: Any = node.meta.get("val")
    return node.op == "call_function" and _is_tensor_on(value, device.type)


def _is_tensor_on(value: Any, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == kind


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if context.device.type == DEVICE_TYPE:
        make_host_constants_on(context.device, graph.module)
    return graph


PASS = Pass(
    "host_constants",
    _run,
    "on the device, tensors made of numbers alone (`torch.arange(n)`, and what is computed from it) are made there, unless an "
    "op of the host reads them",
)
