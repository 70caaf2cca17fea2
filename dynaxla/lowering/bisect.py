"""Finds the op on which XLA fails to compile a graph, or from which on results are not eager's, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dynaxla.isolation.failures import CompilerFailure
from dynaxla.lowering.call_graph import op_call
from dynaxla.types import ORIGIN


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node of a static graph that cannot be compiled, and the failure."""

    node: Node
    failure: CompilerFailure


def find_first_failing(
    graph: Graph,
    succeeds: Callable[[Graph], bool],
    *,
    is_own: Callable[[Node], bool] = lambda node: ORIGIN in node.meta,
) -> Node | None:
    """Finds the first op with which a prefix of the graph stops compiling, or giving eager's results. Returns None if the
    whole graph does not fail.

    XLA optimizes across ops, so an op may fail only after certain others. Bisection over the graph's prefixes finds where to
    cut it in a few compiles, whether or not the op fails alone.

    Args:
        succeeds: whether a prefix does not fail.
        is_own: whether a node may be returned; in a static graph those without an origin are permutations at the boundary,
            which specializing adds.
    """
    nodes = [n for n in graph.nodes if is_own(n) and isinstance(n.meta.get("val"), torch.Tensor)]
    if not nodes or succeeds(graph):
        return None
    good, bad = 0, len(nodes)
    while bad - good > 1:
        middle = (good + bad) // 2
        if succeeds(cut_after(graph, nodes[middle - 1])):
            good = middle
        else:
            bad = middle
    failing: Node = nodes[bad - 1]
    return failing


def equal_calls(graph: Graph, node: Node) -> list[Node]:
    """The nodes that make the same call as `node` on results of the same calls: they fail alike."""
    wanted = _signature(node)
    return [n for n in graph.nodes if n.target is node.target and ORIGIN in n.meta and _signature(n) == wanted]


def _signature(node: Node) -> list[str]:
    nodes = [node, *(n for n in node.all_input_nodes if n.op == "call_function")]
    return [op_call(n)[0].key for n in nodes]


def cut_after(graph: Graph, last: Node) -> Graph:
    """Returns the prefix of the graph up to a node; its results are all values that the rest of the graph reads."""
    beginning = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = beginning.node_copy(node, copies.__getitem__)
        if node is last:
            break
    tensors = [n for n in copies if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)]
    beginning.output(tuple(copies[n] for n in tensors if any(user not in copies for user in n.users)))
    return beginning
