"""Outputs that are views of inputs or of other outputs, in graphs whose sizes vary: torch makes them.

AOTAutograd replays such a view by the sizes, strides and offset of the graph's result, where these vary; an executable's
result lies in memory of its own, in which strides and offset are others. In graphs of fixed sizes AOTAutograd replays
the view ops instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from dynaxla.stages import SAVED

Outputs = list[Any]
"""What a graph returns."""


@dataclass(frozen=True, slots=True)
class Aliases:
    """The outputs that torch makes.

    Attributes:
        places: which outputs.
        bases: the outputs that they are views of.
        make: from the graph's arguments and the bases to the views, in order.
    """

    places: tuple[int, ...]
    bases: tuple[int, ...]
    make: Callable[..., Sequence[Any]]

    def around(self, function: Callable[[Sequence[Any]], Outputs]) -> Callable[[Sequence[Any]], Outputs]:
        """The function that makes the other outputs, made to give these too."""

        def run(args: Sequence[Any]) -> Outputs:
            outputs = function(args)
            views = self.make(*args, *[outputs[place] for place in self.bases])
            for place, view in zip(self.places, views, strict=True):
                outputs[place] = view
            return outputs

        return run


def split_aliases(module: GraphModule) -> Aliases | None:
    """Takes the outputs that are views of inputs or of other outputs out of a graph, which gives None for them.

    Returns:
        What makes them; None if there are none, or if all sizes are fixed.
    """
    graph = module.graph
    output = graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)) or not _varies(graph):
        return None
    kept = list(returned)
    sources = {i: _sources(item) for i, item in enumerate(kept) if isinstance(item, Node) and _is_view(item)}
    places = tuple(i for i, found in sources.items() if all(_is_input(node) or node in kept for node in found))
    if not places:
        return None
    bases = list(dict.fromkeys(node for i in places for node in sources[i] if not _is_input(node)))
    for base in bases:
        base.meta.pop(SAVED, None)  # torch's view ops may ask for its strides
    make = _views_alone(module, bases, [kept[place] for place in places])  # type: ignore[misc]
    for place in places:
        kept[place] = None
    output.args = (tuple(kept),)
    graph.eliminate_dead_code()
    return Aliases(places, tuple(kept.index(base) for base in bases), make.forward)


def _varies(graph: Graph) -> bool:
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(size, torch.SymInt)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
    )


def _sources(view: Node) -> list[Node]:
    """What a view and the sizes that it is made with are made from by views and arithmetic on sizes alone."""
    found: dict[Node, None] = {}
    stack = [view]
    while stack:
        node = stack.pop()
        if _is_view(node) or (node.op == "call_function" and not _holds_tensors(node)):
            stack.extend(node.all_input_nodes)
        else:
            found[node] = None
    return list(found)


def _is_input(node: Node) -> bool:
    return node.op == "placeholder"


def _is_view(node: Node) -> bool:
    """Whether the node is a view of an operand, or one of the views that an op like split gives."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _is_view(node.args[0])
    if not isinstance(node.target, OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _holds_tensors(node: Node) -> bool:
    value = node.meta.get("val")
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,)))


def _views_alone(module: GraphModule, bases: Sequence[Node], views: Sequence[Node]) -> GraphModule:
    """The views as a graph of their own, of the inputs and the bases."""
    graph = Graph()
    nodes = list(module.graph.nodes)
    copies = {node: graph.node_copy(node) for node in nodes if _is_input(node)}
    copies.update({base: graph.placeholder(f"base_{base.name}") for base in bases})
    needed: set[Node] = set()
    stack = list(views)
    while stack:
        node = stack.pop()
        if node not in copies and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[view] for view in views))
    return GraphModule(module, graph)
