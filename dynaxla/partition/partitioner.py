"""Partitions a graph into compiled parts and eager nodes, only around ops that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from dynaxla.decompositions.assertions import Assertion
from dynaxla.diagnostics import FallbackReason
from dynaxla.fx.graph_utils import tensors_of
from dynaxla.partition.op_support import is_assertion, is_size_arithmetic, is_size_check
from dynaxla.partition.output_views import Aliases
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.part_signature import PartIdentity, PartSignature
from dynaxla.torch_api.symbols import is_read_value
from dynaxla.types import IN_PLACE, BackwardInputs, Saved

Refuse = Callable[[Node], FallbackReason | None]


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioned graph.

    Attributes:
        root: None if the whole graph, except assertions about values, is one compiled part; else a graph whose
            `call_module` nodes are the compiled parts and whose `call_function` nodes run in eager.
        reasons: one for each eager node.
    """

    root: GraphModule | None
    reasons: tuple[FallbackReason, ...]


def partition(module: GraphModule, refuse: Refuse) -> Partition:
    """Partitions a functional graph. `refuse` returns why a `call_function` node cannot be compiled, or None."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    run_by_torch = {n for n in calls if is_size_check(n) or is_assertion(n) or IN_PLACE in n.meta}
    run_by_torch.update(*map(_arithmetic_of, filter(is_size_check, calls)))
    run_by_torch.update(filter(_is_arithmetic_of_values, calls))
    refused = {n: reason for n in calls if n not in run_by_torch and (reason := refuse(n)) is not None}
    if not refused and all(map(is_assertion, run_by_torch)):
        return Partition(None, ())
    eager = {*refused, *run_by_torch}
    for node in module.graph.nodes:
        if _picks_from(node, eager):  # `getitem` of an eager op's results belongs to that op
            eager.add(node)
    graph = torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, mapping))
    copy = torch.fx.GraphModule(module, graph)  # copies the modules that the graph references
    left = {mapping[n] for n in eager}
    support = create_op_support(lambda _, node: node.op == "call_function" and node not in left)
    partitioner = CapabilityBasedPartitioner(copy, support, allows_single_node_partition=True)
    root = partitioner.fuse_partitions(_with_work(partitioner.propose_partitions()))
    return Partition(root, tuple(refused.values()))


def _is_arithmetic_of_values(node: Node) -> bool:
    """Whether a node computes with numbers that were read out of tensors: a part would be compiled for each of them."""
    return is_size_arithmetic(node) and any(is_read_value(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def _arithmetic_of(check: Node) -> set[Node]:
    """The arithmetic whose result a check reads: torch computes it of the numbers and tensors of the call. A part would compute
    it of its sizes, for which the check holds: capture writes 3 for n behind `torch._check(n == 3)`."""
    found: set[Node] = set()
    pending = [check]
    while pending:
        operands = pending.pop().all_input_nodes
        made = {n for n in operands if n.op == "call_function" and is_size_arithmetic(n) and not tensors_of(n)} - found
        pending.extend(made)
        found |= made
    return found


def _picks_from(node: Node, eager: set[Node]) -> bool:
    return (
        node.op == "call_function"
        and not node.kwargs
        and bool(node.args)
        and node.args[0] in eager
        and (getattr(node.target, "__name__", "") == "getitem")
    )


def _with_work(partitions: list) -> list:  # type: ignore[type-arg]
    """Returns the partitions that compute a tensor; pure size arithmetic stays in the root graph, where it is free."""
    return [p for p in partitions if any(isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)) for n in p.nodes)]


@dataclass(frozen=True, slots=True)
class WholePart:
    """A graph that is one compiled part.

    Attributes:
        assertions: those that were taken out of it.
    """

    graphs: PartGraphs
    assertions: tuple[Assertion, ...]


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A graph with nodes that run in eager.

    Attributes:
        root: as in `Partition`.
        reasons: one for each node that runs in eager.
        weights: positions of the inputs whose values rarely change between calls.
        constants: values of the last placeholders.
    """

    root: GraphModule
    reasons: tuple[FallbackReason, ...]
    weights: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    saved: Saved


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A stored graph that is one part: all that calls need, except its programs.

    Attributes:
        circumstances: digest of the inputs of the passes, other than the graph, its policies and options.
        device: the device on which torch computes the graph.
        facts, known: the part's `PartFacts` and `Known`.
        assertions: those that were taken out of it.
        seeds: the devices of its random draws.
        aliases: the outputs that torch computes as views, or None.
        backward: the gradients that it was built for, if it is a backward.
    """

    circumstances: str
    device: torch.device
    facts: PartSignature
    known: PartIdentity
    assertions: tuple[Assertion, ...]
    seeds: tuple[torch.device, ...]
    aliases: Aliases | None
    backward: BackwardInputs | None = None
