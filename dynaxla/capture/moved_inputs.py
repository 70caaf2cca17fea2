"""Inputs whose sizes or strides change in place, as `x.contiguous().t_()` changes x where x is contiguous."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from dynaxla.stages import KEPT_VIEW


def keep_views_of_moved_inputs(graph: Graph, metadata: Any) -> None:
    """Marks the views that say how inputs lie afterwards, so that torch makes them.

    The graph gives such a view of the input as a result, and AOTAutograd moves the input to the view's sizes, strides
    and offset; an executable's result lies in memory of its own, where the offset means nothing.

    Args:
        graph: a forward graph.
        metadata: AOTAutograd's, or None if it is not known.
    """
    if metadata is None:
        return
    results = graph.output_node().args[0]
    for place, index in enumerate(metadata.mutated_inp_runtime_indices, start=len(metadata.tokens)):
        info = metadata.input_info[index]
        if info.mutates_metadata and not info.mutates_data:
            _mark(results[place])  # type: ignore[index, arg-type]


def _mark(node: Node) -> None:
    while node.op == "call_function":
        node.meta[KEPT_VIEW] = True
        node = node.args[0]  # type: ignore[assignment]
