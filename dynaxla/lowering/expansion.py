"""Aten forms in place of the ops that torch-mlir lowers in that form (`ops.aten_calls`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node, map_arg

from dynaxla.ops.aten_calls import Calls, Form


@dataclass(frozen=True, slots=True)
class Expanded:
    """A graph with aten forms in it.

    Attributes:
        made: the nodes of aten forms.
    """

    graph: Graph
    made: frozenset[Node]


def expand(graph: Graph, forms: Mapping[Any, Form], expands: Callable[[Node], bool]) -> Expanded:
    """The graph with aten forms in place of the calls that have one and of which `expands` is true.

    Every other node is a copy with the same meta. Without such calls it is the graph itself.
    """
    chosen = {node for node in graph.nodes if node.op == "call_function" and node.target in forms and expands(node)}
    if not chosen:
        return Expanded(graph, frozenset())
    expanded, copies = Graph(), set()
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node in chosen:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = forms[node.target](Calls(expanded, node), *args, **kwargs)
        elif node.target is operator.getitem and node.args[0] in chosen:
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = expanded.node_copy(node, values.__getitem__)
            copies.add(values[node])
    expanded.eliminate_dead_code()
    return Expanded(expanded, frozenset(node for node in expanded.nodes if node not in copies))
