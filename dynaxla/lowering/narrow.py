"""Which ops of a graph a native compiler fails on, by halving: torch-mlir apart from each other, XLA by how much it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dynaxla.errors import LoweringCrashed, LoweringError, LoweringOutOfMemory, LoweringTimeout
from dynaxla.isolation.failures import Failure, KnownFailures
from dynaxla.lowering.importer import ImportedModule, body_call
from dynaxla.observe.repro import write_repro
from dynaxla.stages import ORIGIN

# A rejection is cheap to see again and says more than a remembered one; only these are kept on disk.
_KEPT_ON_DISK = (LoweringCrashed, LoweringOutOfMemory, LoweringTimeout)

# Calls to try one by one: starting a child after a death takes as long.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node of a static graph that fails by itself, and how."""

    node: Node
    failure: Failure


@dataclass(frozen=True, slots=True)
class Narrower:
    """Lowers ops apart from each other.

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
        """Those of the nodes that torch-mlir cannot lower; of equal calls one is tried."""
        calls: dict[str, list[Node]] = {}
        for node in nodes:
            calls.setdefault(body_call(node)[0].key, []).append(node)
        self._find([key for key in calls if self.failures.get(key) is None], calls)
        known = ((key, self.failures.get(key)) for key in calls)
        return [Culprit(node, failure) for key, failure in known if failure is not None for node in calls[key]]

    def _find(self, keys: Sequence[str], calls: Mapping[str, Sequence[Node]]) -> None:
        """Adds to what is known those of the calls that fail alone."""
        if len(keys) <= _FEW:
            self._try_each(keys, calls)
            return
        try:
            self.lower_one(self.import_one(_apart([calls[key][0] for key in keys])).bytecode)
        except LoweringTimeout:  # each half may take as long again; most of the calls alone take no time
            self._try_each(keys, calls)
        except LoweringError:
            middle = len(keys) // 2
            self._find(keys[:middle], calls)
            self._find(keys[middle:], calls)

    def _try_each(self, keys: Sequence[str], calls: Mapping[str, Sequence[Node]]) -> None:
        for key in keys:
            self._try_alone(calls[key][0], key)

    def _try_alone(self, node: Node, key: str) -> None:
        text = ""
        try:
            imported = self.import_one(_apart([node]))
            text = imported.text
            self.lower_one(imported.bytecode)
        except LoweringError as error:
            failure = Failure(str(node.target), error.id, error.explanation, self._repro(text, error))
            self.failures.add(key, failure, on_disk=isinstance(error, _KEPT_ON_DISK))
            self.report(node, failure)

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
    return [body_call(n)[0].key for n in nodes]


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


def _apart(nodes: Sequence[Node]) -> Graph:
    """A graph of the nodes in which none reads another's result."""
    graph = Graph()
    operands = [(node, operand) for node in nodes for operand in node.all_input_nodes]
    inputs = {pair: graph.placeholder(f"{pair[1].name}_{i}") for i, pair in enumerate(operands)}
    for (_, operand), placeholder in inputs.items():
        placeholder.meta = {"val": operand.meta["val"]}
    results: list[Node] = []
    for node in nodes:
        copy = graph.node_copy(node, lambda operand, node=node: inputs[node, operand])  # type: ignore[misc]
        values = node.meta["val"]
        results += [copy] if isinstance(values, torch.Tensor) else _pick_all(graph, copy, values)
    graph.output(tuple(results))
    return graph


def _pick_all(graph: Graph, node: Node, values: list[object]) -> Iterator[Node]:
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            pick = graph.call_function(operator.getitem, (node, index))
            pick.meta = {"val": value}
            yield pick
