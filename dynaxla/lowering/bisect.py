"""Which op of a graph XLA fails on, by how much of the graph it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dynaxla.isolation.failures import Failure
from dynaxla.lowering.call_graph import op_call
from dynaxla.types import ORIGIN


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node of a static graph that fails by itself, and how."""

    node: Node
    failure: Failure


def first_failing(graph: Graph, compiles: Callable[[Graph], bool]) -> Node | None:
    """The op with which a graph stops compiling: it compiles up to there, and not with it. None if all compiles.

    XLA optimizes across ops, so that an op may fail only after certain others: bisection over the beginnings of the
    graph finds where to cut it in a few compiles, whether or not the op fails alone.
    """
    # Nodes without an origin are permutations at the boundary, which specializing adds.
    nodes = [n for n in graph.nodes if ORIGIN in n.meta and isinstance(n.meta["val"], torch.Tensor)]
    if not nodes or compiles(graph):
        return None
    good, bad = 0, len(nodes)
    while bad - good > 1:
        middle = (good + bad) // 2
        if compiles(_beginning(graph, nodes[middle - 1])):
            good = middle
        else:
            bad = middle
    failing: Node = nodes[bad - 1]
    return failing


def alike(graph: Graph, node: Node) -> list[Node]:
    """The nodes of a graph that make the same call as this one, of results of the same calls: what fails once fails again."""
    wanted = _signature(node)
    return [n for n in graph.nodes if n.target is node.target and ORIGIN in n.meta and _signature(n) == wanted]


def _signature(node: Node) -> list[str]:
    nodes = [node, *(n for n in node.all_input_nodes if n.op == "call_function")]
    return [op_call(n)[0].key for n in nodes]


def _beginning(graph: Graph, last: Node) -> Graph:
    """The graph up to a node, with everything as a result that the rest reads."""
    beginning = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = beginning.node_copy(node, copies.__getitem__)
        if node is last:
            break
    tensors = [n for n in copies if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)]
    beginning.output(tuple(copies[n] for n in tensors if any(user not in copies for user in n.users)))
    return beginning
