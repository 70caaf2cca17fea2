"""Compiled parts and eager nodes: one graph, cut only where an op cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from dynaxla.diagnostics import FallbackReason
from dynaxla.partition.op_support import is_assertion, is_size_check
from dynaxla.types import IN_PLACE

Refuse = Callable[[Node], FallbackReason | None]


@dataclass(frozen=True, slots=True)
class Partition:
    """A graph, cut.

    Attributes:
        root: None if the whole graph is one compiled part, but for assertions about values; else a graph whose
            `call_module` nodes are the compiled parts and whose `call_function` nodes run in eager.
        reasons: one per eager node.
    """

    root: GraphModule | None
    reasons: tuple[FallbackReason, ...]


def partition(module: GraphModule, refuse: Refuse) -> Partition:
    """Cuts a functional graph; `refuse` says of every `call_function` node why it cannot be compiled."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    torchs_own = {n for n in calls if is_size_check(n) or is_assertion(n) or IN_PLACE in n.meta}
    refused = {n: reason for n in calls if n not in torchs_own and (reason := refuse(n)) is not None}
    if not refused and all(map(is_assertion, torchs_own)):
        return Partition(None, ())
    eager = {*refused, *torchs_own}
    for node in module.graph.nodes:
        if _picks_from(node, eager):  # a pick out of an eager op's several results belongs to that op
            eager.add(node)
    graph = torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, mapping))
    copy = torch.fx.GraphModule(module, graph)  # takes along the modules that the graph names
    support = _Supports({mapping[n] for n in eager})
    partitioner = CapabilityBasedPartitioner(copy, support, allows_single_node_partition=True)
    root = partitioner.fuse_partitions(_with_work(partitioner.propose_partitions()))
    return Partition(root, tuple(refused.values()))


class _Supports(OperatorSupportBase):
    def __init__(self, eager: set[Node]) -> None:
        self._eager = eager

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node.op == "call_function" and node not in self._eager


def _picks_from(node: Node, eager: set[Node]) -> bool:
    return (
        node.op == "call_function"
        and not node.kwargs
        and bool(node.args)
        and node.args[0] in eager
        and (getattr(node.target, "__name__", "") == "getitem")
    )


def _with_work(partitions: list) -> list:  # type: ignore[type-arg]
    """Parts that compute at least one tensor; arithmetic on sizes alone stays in the root, where it costs nothing."""
    return [p for p in partitions if any(isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)) for n in p.nodes)]
