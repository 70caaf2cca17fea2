"""Outputs that share memory, with one another or with inputs: torch makes them views of one tensor, as eager does.

Each result of an executable has memory of its own, so a write into one would not be seen in the other. AOTAutograd makes some
of these views itself, but not all: it takes views of an input by `split` or `unbind` that need a gradient, and those that
a user's autograd function returns, as the graph gives them, and where sizes vary it replays a view by the strides and the
offset of the graph's result, which are others in an executable's memory. So a view of an input to which the graph writes is
taken of the input, and not of its new value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.fx.edit import has_memory, holds_tensors, is_view, memory_of, tolerate_strides
from dynaxla.partition.output_views import Aliases
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.types import Saved

aten = torch.ops.aten


def split_aliases(module: GraphModule, saved: Saved, inputs: GraphInputs | None = None) -> Aliases | None:
    """Takes the outputs that torch is to make out of a graph, which gives None for them.

    Args:
        inputs: what AOTAutograd knows of the graph's inputs.
        saved: what a forward keeps for the backward alone. No output that a view is made of may be such: torch's view ops may
            ask for its strides.

    Returns:
        What makes them; None if there are none.
    """
    graph = module.graph
    output = graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)):
        return None
    kept = list(returned)
    if inputs is not None:
        _view_inputs(graph, kept, inputs)
    varies = _varies(graph)
    if saved.inputs and not varies:
        return None
    shared = set() if saved.inputs else _shared_memory(kept, saved)
    sources = {i: _sources(item) for i, item in enumerate(kept) if isinstance(item, Node) and is_view(item)}
    known = {*graph.find_nodes(op="placeholder"), *(item for item in kept if isinstance(item, Node))}
    places = tuple(
        i
        for i, found in sources.items()
        if known.issuperset(found)
        or (memory_of(kept[i]) in shared and not any(_is_input(node) and holds_tensors(node) for node in found))
    )
    if not places:
        return None
    bases = list(dict.fromkeys(node for i in places for node in sources[i] if not _is_input(node)))
    views: list[Any] = [kept[place] for place in places]
    make = _views_alone(module, bases, views, detaches=saved.in_training and not saved.inputs)
    # What a forward saved may lie in padded memory, and an input that is written to keeps its strides.
    tolerate_strides(make.graph)
    make.recompile()
    for place in places:
        kept[place] = None
    kept += [base for base in bases if base not in kept]
    output.args = (tuple(kept),)
    graph.eliminate_dead_code()
    return Aliases(places, tuple(kept.index(base) for base in bases), len(returned), make)


def _view_inputs(graph: Graph, results: list[Any], inputs: GraphInputs) -> None:
    """Takes the results that are views of inputs of the inputs' new values no more, which lie elsewhere in memory."""
    placeholders = graph.find_nodes(op="placeholder")
    written = {write.input: results[write.result] for write in inputs.writes}
    for place in inputs.unread:
        index = inputs.views[place]
        if isinstance(results[place], Node) and is_view(results[place]):
            results[place] = _replayed(graph, results[place], {written[index]: placeholders[index]})


def _replayed(graph: Graph, view: Node, values: dict[Node, Node]) -> Node:
    """The view made anew, of other values where `values` has them; the view itself where it is made of none of these."""
    if view in values:
        return values[view]
    if is_view(view):
        operands = {node: _replayed(graph, node, values) for node in view.all_input_nodes}
        if any(made is not node for node, made in operands.items()):
            with graph.inserting_before(graph.output_node()):
                values[view] = graph.node_copy(view, operands.__getitem__)
    return values.get(view, view)


def _shared_memory(outputs: Sequence[Any], saved: Saved) -> set[int]:
    """The memory of which a caller gets several views. Nobody writes to what a backward alone reads, or to gradients."""
    given = dict.fromkeys(x for i, x in enumerate(outputs) if isinstance(x, Node) and i not in saved.outputs)
    counts = Counter(memory_of(item) for item in given if has_memory(item))
    return {memory for memory, count in counts.items() if count > 1}


def _varies(graph: Graph) -> bool:
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(size, torch.SymInt)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
    )


def _sources(view: Node) -> list[Node]:
    """What a view and the sizes that it is made with are made from by views and arithmetic on sizes alone."""
    found: dict[Node, None] = {}
    stack = [view]
    while stack:
        node = stack.pop()
        if is_view(node) or (node.op == "call_function" and not holds_tensors(node)):
            stack.extend(node.all_input_nodes)
        else:
            found[node] = None
    return list(found)


def _is_input(node: Node) -> bool:
    return node.op == "placeholder"


def _views_alone(module: GraphModule, bases: Sequence[Node], views: Sequence[Node], *, detaches: bool) -> GraphModule:
    """The views as a graph of their own, of the inputs and the bases.

    Args:
        detaches: whether they are views of detached bases: a view of an output that has a gradient has one, too, whatever
            AOTAutograd says of it.
    """
    graph = Graph()
    nodes = list(module.graph.nodes)
    copies = {node: graph.node_copy(node) for node in nodes if _is_input(node)}
    copies.update({base: graph.placeholder(f"base_{base.name}") for base in bases})
    if detaches:
        copies.update({base: graph.call_function(aten.detach.default, (copies[base],)) for base in bases})
    needed: set[Node] = set()
    stack = list(views)
    while stack:
        node = stack.pop()
        if node not in copies and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[view] for view in views))
    return GraphModule(module, graph)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    split = split_aliases(graph.module, graph.saved, graph.inputs)
    if split is None:
        return graph
    outputs: Any = graph.module.graph.output_node().args[0]
    bases = {outputs[place] for place in split.bases}
    saved = frozenset(place for place in graph.saved.outputs if outputs[place] not in bases)
    return replace(graph, aliases=split, saved=replace(graph.saved, outputs=saved))


PASS = Pass(
    "output_aliases",
    _run,
    "no two outputs share memory, and none an input's unless a backward alone reads it: `aliases` makes those of the others, "
    "which are no more `saved`, and the graph gives None",
)
