"""Whole FX graphs: their copies, their runs by eager PyTorch, and the tensors of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.fx.edit import tolerate_strides
from dynaxla.torch_api.custom_ops import python_function_of
from dynaxla.torch_api.fakes import find_opaque_class
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.torch_api.symbols import is_ragged
from dynaxla.types import SUBGRAPHS, Saved


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The fake tensors of a node's value: one, several for an op with several results, none for a number."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def find_device(module: GraphModule) -> torch.device:
    """The device that a graph computes on: an accelerator if any tensor is on one."""
    values = [value for node in module.graph.nodes for value in tensors_of(node)]
    away = [value.device for value in values if value.device.type not in ("cpu", "meta")]
    return away[0] if away else torch.device("cpu")


def opaque_class_of(node: Node) -> str | None:
    """The class of a node's value if it is an object such as a device mesh, or a ragged size; None for a tensor or a number."""
    value = node.meta.get("val")
    return "NestedInt" if is_ragged(value) else find_opaque_class(value)


def copy_graph(graph: Graph) -> Graph:
    """A copy of a graph; nodes keep their names and meta values."""
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def list_subgraphs(node: Node) -> list[GraphModule]:
    """The graphs that a call of a higher-order operator, or of what that became, computes."""
    if SUBGRAPHS in node.meta:
        return list(node.meta[SUBGRAPHS])
    owner = node.graph.owning_module
    found = [] if owner is None else [submodule(owner, each) for each in tree_leaves(node.args)]
    return [each for each in found if each is not None]


def submodule(module: GraphModule, node: object) -> GraphModule | None:
    """The graph that a `get_attr` node names; None for anything else."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = attribute(module, node)
    return value if isinstance(value, GraphModule) else None


def attribute(module: GraphModule, node: Node) -> Any:
    """The value that a `get_attr` node reads from its module."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def make_eager_function(
    module: GraphModule, saved: Saved, *, in_transforms: bool = False
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that computes a graph's outputs by eager PyTorch, for inputs of any strides.

    Args:
        saved: what a forward saved for the graph, if it is a backward: these inputs may have gaps.
        in_transforms: whether transforms wrap the inputs (`torch_api.transforms`). The package's own ops are then made of
            torch's, which all transforms know: an op that is not differentiable forward drops a tangent without a word.
    """
    graph = copy_graph(module.graph)
    tolerate_strides(graph)
    if in_transforms:
        _open_own_ops(graph)
    forward = GraphModule(module, graph).forward

    def run(args: Sequence[Any]) -> list[Any]:
        results = forward(*(make_dense(args) if saved.inputs else args))
        return list(results) if isinstance(results, (tuple, list)) else [results]

    return run


def _open_own_ops(graph: Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "dynaxla":
            node.target = python_function_of(node.target) or node.target


def make_dense(args: Sequence[Any]) -> Sequence[Any]:
    """A backward's arguments as eager ops may read them: tensors that are views of padded memory are copied to dense ones."""
    return [_dense(value) if isinstance(value, torch.Tensor) else value for value in args]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dense = torch.empty_like(tensor)  # in the same order of dims, as a clone has them
    return tensor if dense.stride() == tensor.stride() else tensor.clone()


def is_determined(node: Node) -> bool:
    """Whether a node's value follows from those that it reads: it is no input, no draw and no memory of any content."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or "empty" in op.name():
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags
