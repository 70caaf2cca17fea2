"""Which ops of a graph a native compiler fails on: torch-mlir one by one, XLA by how much of the graph it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dynaxla.debug.repro import write_repro
from dynaxla.errors import LoweringCrashed, LoweringError, LoweringOutOfMemory, LoweringTimeout
from dynaxla.failures import Failure, KnownFailures
from dynaxla.lowering.importer import ImportedModule, rule_call

# A rejection is cheap to see again and says more than a remembered one; only these are kept on disk.
_KEPT_ON_DISK = (LoweringCrashed, LoweringOutOfMemory, LoweringTimeout)


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node of a static graph that fails by itself, and how."""

    node: Node
    failure: Failure


@dataclass(frozen=True, slots=True)
class Narrower:
    """Lowers ops one by one.

    Attributes:
        failures: what is known already; what is found is added.
        import_one: makes a module of a graph; raises LoweringError.
        lower_one: lowers a module; raises LoweringError.
        report: is told every failure that was not known.
        version: the StableHLO version that the repro scripts ask for.
    """

    failures: KnownFailures
    import_one: Callable[[Graph], ImportedModule]
    lower_one: Callable[[bytes], object]
    report: Callable[[Node, Failure], None]
    version: str

    def culprits(self, nodes: Iterable[Node]) -> list[Culprit]:
        """Those of the nodes that torch-mlir cannot lower; equal calls are tried once."""
        innocent: set[str] = set()
        found = []
        for node in nodes:
            key = rule_call(node)[0].key
            if key in innocent:
                continue
            failure = self.failures.get(key) or self._try_alone(node, key)
            if failure is None:
                innocent.add(key)
            else:
                found.append(Culprit(node, failure))
        return found

    def _try_alone(self, node: Node, key: str) -> Failure | None:
        text = ""
        try:
            imported = self.import_one(_single_op_graph(node))
            text = imported.text
            self.lower_one(imported.bytecode)
        except LoweringError as error:
            failure = Failure(str(node.target), error.id, error.explanation, self._repro(text, error))
            self.failures.add(key, failure, on_disk=isinstance(error, _KEPT_ON_DISK))
            self.report(node, failure)
            return failure
        return None

    def _repro(self, text: str, error: LoweringError) -> str | None:
        try:
            return str(write_repro("torch-mlir", text, str(error), self.version)) if text else None
        except OSError:
            return None  # no place to write to: the failure is told all the same


def first_failing(graph: Graph, compiles: Callable[[Graph], bool]) -> Node | None:
    """The op with which a graph stops compiling: it compiles up to there, and not with it. None if all compiles.

    XLA optimizes across ops, so that an op may fail only after certain others: bisection over the beginnings of the
    graph finds where to cut it in a few compiles, whether or not the op fails alone.
    """
    # Nodes without an origin are permutations at the boundary, which specializing adds.
    nodes = [n for n in graph.nodes if "origin" in n.meta and isinstance(n.meta["val"], torch.Tensor)]
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


def _single_op_graph(node: Node) -> Graph:
    graph = Graph()
    inputs: dict[Node, Node] = {}
    for operand in node.all_input_nodes:
        inputs[operand] = graph.placeholder(operand.name)
        inputs[operand].meta = {"val": operand.meta["val"]}
    copy = graph.node_copy(node, inputs.__getitem__)
    values = node.meta["val"]
    graph.output((copy,) if isinstance(values, torch.Tensor) else tuple(_pick_all(graph, copy, values)))
    return graph


def _pick_all(graph: Graph, node: Node, values: list[object]) -> Iterator[Node]:
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            pick = graph.call_function(operator.getitem, (node, index))
            pick.meta = {"val": value}
            yield pick
