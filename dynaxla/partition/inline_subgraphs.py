"""Inlines sub-graph calls (`torch.compiler.nested_compile_region`) into the graph that calls them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from dynaxla.fx.graph_utils import attribute, submodule

INVOKE = torch.ops.higher_order.invoke_subgraph


def results_of(graph: Graph) -> Sequence[Argument]:
    """Returns the results of a graph that returns several."""
    results: Sequence[Argument] = graph.output_node().args[0]  # type: ignore[assignment]
    return results


def has_symbols(graph: Graph) -> bool:
    """Whether a size of an input is symbolic."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    return any(type(size) is not int for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,)))


def inline_call(module: GraphModule, node: Node) -> bool:
    """Replaces a call of `invoke_subgraph` by copies of the sub-graph's nodes.

    Returns:
        False, without a change, if the sub-graph was traced at other sizes, or returns a plain number.
    """
    called = submodule(module, node.args[0])
    assert called is not None
    operands = list(node.args[2:])
    inputs = [n for n in called.graph.nodes if n.op == "placeholder"]
    returned = results_of(called.graph)
    if [_sizes(n) for n in inputs] != [_sizes(x) for x in operands]:
        return False
    if not all(x is None or isinstance(x, Node) for x in returned):
        return False
    copies: dict[Node, Argument] = dict(zip(inputs, operands, strict=True))
    with module.graph.inserting_before(node):
        for inner in called.graph.nodes:
            if inner.op in ("call_function", "get_attr"):
                copies[inner] = made = module.graph.node_copy(inner, lambda n: copies[n])
                if inner.op == "get_attr":
                    made.target = _adopt(module, called, inner)
    replace_picks(module.graph, node, [None if x is None else copies[x] for x in returned])  # type: ignore[index, misc]
    return True


def replace_picks(graph: Graph, node: Node, values: Sequence[Node | None]) -> None:
    """Replaces `getitem` nodes of a node's results by `values`, and erases unused nodes; None keeps a `getitem` node."""
    for user in list(node.users):
        value = values[user.args[1]]  # type: ignore[index]
        if value is not None:
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)


def _adopt(module: GraphModule, called: GraphModule, node: Node) -> str:
    """Makes an attribute of the called module one of the calling module. Returns its name there."""
    value = attribute(called, node)
    existing = {id(v): name for name, v in module.named_children()}
    name = existing.get(id(value)) or f"adopted_{len(existing)}"
    setattr(module, name, value)
    return name


def _sizes(value: object) -> str:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return str((value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value)
