"""Inputs that a graph writes to, where memory is PJRT's own: an executable may take their memory for the new values.

A write of one position into a key-value cache then costs the position and not the cache.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch.fx import Graph, GraphModule, Node

from dynaxla.fx.permutations import invert_permutation
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.types import DONATED, StaticGraph, TensorSpec


def mark_donated(module: GraphModule, inputs: GraphInputs, bases: set[int], *, trains: bool) -> None:
    """Gives `meta[DONATED]` to the placeholders whose memory may be taken.

    Args:
        module: a graph whose results begin with the new values of the inputs that it writes to.
        inputs: what AOTAutograd knows of its inputs.
        bases: the results that torch makes views of: these must stay what they are.
        trains: autograd tells an input that it follows from the input's new value: these are left.
    """
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    results: Any = output.args[0]
    for changed in inputs.writes:
        node, value = placeholders[changed.input], results[changed.result]
        is_alone = isinstance(value, Node) and results.count(value) == 1 and changed.result not in bases
        replaced = changed.data and not changed.metadata and not (trains and changed.requires_grad)
        if replaced and is_alone and value.op != "placeholder" and output not in node.users:
            node.meta[DONATED] = changed.result


def mark_inner(root: Graph, part: Node, inner: GraphModule) -> None:
    """Marks the placeholders of a part of a cut graph: of the graph's own inputs those that nothing but the part reads.

    Args:
        root: the cut graph.
        part: the node that calls the part.
        inner: the part.
    """
    returned: Any = root.output_node().args[0]
    own: Any = inner.graph.output_node().args[0]
    for node, given in zip(inner.graph.find_nodes(op="placeholder"), part.args, strict=True):
        node.meta.pop(DONATED, None)
        if isinstance(given, Node) and DONATED in given.meta and list(given.users) == [part]:
            value = returned[given.meta[DONATED]]
            if part.args.count(given) > 1:
                continue
            if value is part and isinstance(own, Node):
                node.meta[DONATED] = 0
            elif value.target is getitem and value.args[0] is part and len(value.users) == 1:
                node.meta[DONATED] = value.args[1]


def forget_donated(module: GraphModule) -> None:
    """Nothing is taken: the graph may raise where nothing must have been written."""
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta.pop(DONATED, None)


def donated_arguments(static: StaticGraph, places: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Marks the placeholders of a static graph whose memory fits the result that is their new value, and lies as it does.

    Args:
        places: for arguments of the executable the output of the part that is the new value.

    Returns:
        The arguments, each with its result.
    """
    placeholders = static.graph.find_nodes(op="placeholder")
    results: Any = static.graph.output_node().args[0]
    found: dict[int, int] = {}
    for argument, place in places.items():
        node, source = placeholders[argument], static.outputs[place]
        if source.result is None or source.result in found.values():
            continue
        alike = TensorSpec.from_tensor(node.meta["val"]) == TensorSpec.from_tensor(results[source.result].meta["val"])
        if alike and source.order == _order_of_result(static.argument_orders[argument]):
            found[argument] = node.meta[DONATED] = source.result
    return tuple(found.items())


def _order_of_result(argument: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of a result that lies as an argument of this order does."""
    return None if argument is None else invert_permutation(argument)
