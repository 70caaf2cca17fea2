"""Which ops of a graph torch-mlir cannot lower even alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from dynaxla.errors import LoweringError
from dynaxla.lowering.importer import ImportedModule, rule_call


@dataclass(frozen=True, slots=True)
class Culprit:
    """An op that fails by itself.

    Attributes:
        node: the node of the static graph.
        error: how it failed.
        module: the torch-dialect text of the op alone; empty where importing it failed.
    """

    node: Node
    error: LoweringError
    module: str


def find_culprits(
    graph: Graph,
    ruled: Collection[OpOverload],
    import_one: Callable[[Graph], ImportedModule],
    lower_one: Callable[[bytes], object],
) -> list[Culprit]:
    """Lowers every distinct torch-mlir op of a static graph by itself; gives every node whose op failed.

    Args:
        graph: the graph whose lowering failed.
        ruled: overloads with JAX rules, which torch-mlir never sees.
        import_one, lower_one: the first raises LoweringError, so does the second.
    """
    outcomes: dict[str, tuple[LoweringError, str] | None] = {}
    culprits = []
    for node in _mlir_nodes(graph, ruled):
        key = rule_call(node)[0].key
        if key not in outcomes:
            outcomes[key] = _try_alone(node, import_one, lower_one)
        outcome = outcomes[key]
        if outcome is not None:
            culprits.append(Culprit(node, *outcome))
    return culprits


def _mlir_nodes(graph: Graph, ruled: Collection[OpOverload]) -> Iterator[Node]:
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target not in ruled:
            yield node


def _try_alone(
    node: Node, import_one: Callable[[Graph], ImportedModule], lower_one: Callable[[bytes], object]
) -> tuple[LoweringError, str] | None:
    text = ""
    try:
        imported = import_one(_single_op_graph(node))
        text = imported.text
        lower_one(imported.bytecode)
    except LoweringError as error:
        return error, text
    return None


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
