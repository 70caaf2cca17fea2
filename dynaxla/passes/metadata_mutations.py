"""Inputs whose sizes or strides change in place, as `x.contiguous().t_()` changes x where x is contiguous."""

from __future__ import annotations

from torch.fx import Graph, Node

from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.types import KEPT_VIEW


def keep_views_of_moved_inputs(graph: Graph, inputs: GraphInputs | None) -> None:
    """Marks the views that say how inputs lie afterwards, so that torch makes them.

    The graph gives such a view of the input as a result, and AOTAutograd moves the input to the view's sizes, strides
    and offset; an executable's result lies in memory of its own, where the offset means nothing.

    Args:
        graph: a forward graph.
        inputs: what AOTAutograd knows of its inputs, or None.
    """
    if inputs is None:
        return
    results = graph.output_node().args[0]
    for write in inputs.writes:
        if write.metadata and not write.data:
            _mark(results[write.result])  # type: ignore[index, arg-type]


def _mark(node: Node) -> None:
    while node.op == "call_function":
        node.meta[KEPT_VIEW] = True
        node = node.args[0]  # type: ignore[assignment]


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    keep_views_of_moved_inputs(graph.module.graph, graph.inputs)
    return graph


PASS = Pass(
    "metadata_mutations",
    _run,
    "views that give an input its new sizes, strides and offset have `meta[KEPT_VIEW]`: torch makes them",
)
