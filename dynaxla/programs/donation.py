"""Donated inputs: an executable may take the memory of inputs that the graph writes to, for their new values, if PJRT owns it.

A write of one position into a key-value cache then costs that position and not a copy of the cache.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch.fx import Graph, GraphModule, Node

from dynaxla.diagnostics import user_frame
from dynaxla.fx.permutations import invert_permutation
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.types import DONATED, NOT_DONATED, StaticGraph, TensorSpec


def mark_donated(module: GraphModule, inputs: GraphInputs, bases: set[int], *, trains: bool) -> None:
    """Sets `meta[DONATED]` of the placeholders whose memory may be taken; `meta[NOT_DONATED]` of others that are written.

    Args:
        module: a graph whose first results are the new values of the inputs that it writes to.
        inputs: what AOTAutograd knows of its inputs.
        bases: the results of which torch makes views; these are not donated to.
        trains: whether autograd records the graph; inputs that require a gradient are then not donated.
    """
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    results: Any = output.args[0]
    for changed in inputs.writes:
        node, value = placeholders[changed.input], results[changed.result]
        is_alone = isinstance(value, Node) and results.count(value) == 1 and changed.result not in bases
        if not changed.data or changed.metadata:
            _keep(node, value, "its sizes or strides change")
        elif trains and changed.requires_grad:
            _keep(node, value, "autograd records it")
        elif not is_alone or value.op == "placeholder":
            _keep(node, value, "its new value is another result too")
        elif output in node.users:
            _keep(node, value, "its old value is a result")
        else:
            node.meta[DONATED] = changed.result


def keep_written(module: GraphModule, inputs: GraphInputs) -> None:
    """Sets `meta[NOT_DONATED]` of the placeholders that a graph on host tensors writes to."""
    placeholders: Any = module.graph.find_nodes(op="placeholder")
    results: Any = module.graph.output_node().args[0]
    for changed in inputs.writes:
        why = "torch owns its memory, and PJRT takes what it allocated"
        _keep(placeholders[changed.input], results[changed.result], why)


def _keep(node: Node, new: Any, why: str) -> None:
    line = user_frame(new) if isinstance(new, Node) else None
    node.meta[NOT_DONATED] = f"{describe_value(node)}: {why}{f'; at {line}' if line else ''}"


def describe_value(node: Node) -> str:
    """The dtype and sizes of a node's tensor, "float32[8, 4]"."""
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def mark_inner(root: Graph, part: Node, inner: GraphModule) -> None:
    """Marks the placeholders of one part of a partitioned graph: those of graph inputs that no other node reads.

    Args:
        root: the partitioned graph.
        part: the node that calls the part.
        inner: the part's graph.
    """
    returned: Any = root.output_node().args[0]
    own: Any = inner.graph.output_node().args[0]
    for node, given in zip(inner.graph.find_nodes(op="placeholder"), part.args, strict=True):
        node.meta.pop(DONATED, None)
        if not isinstance(given, Node) or DONATED not in given.meta:
            continue
        value = returned[given.meta[DONATED]]
        is_alone = list(given.users) == [part] and part.args.count(given) == 1
        if is_alone and value is part and isinstance(own, Node):
            node.meta[DONATED] = 0
        elif is_alone and value.target is getitem and value.args[0] is part and len(value.users) == 1:
            node.meta[DONATED] = value.args[1]
        else:
            _keep(node, value, "another part of the graph, or an op in eager, reads it or gives its new value")


def forget_donated(module: GraphModule) -> None:
    """Clears all marks, for a graph that may raise: after an error its inputs must be as before."""
    results: Any = module.graph.output_node().args[0]
    for node in module.graph.find_nodes(op="placeholder"):
        if DONATED in node.meta:
            _keep(
                node,
                results[node.meta.pop(DONATED)],
                "an assertion of the graph may fail, behind which it is as before",
            )


def donated_arguments(static: StaticGraph, places: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Marks the placeholders of a static graph that have the shape, dtype and layout of the result that is their new value.

    Args:
        places: by argument of the executable, the output of the part that is its new value.

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
    """The order of a result with the same layout as an argument of this order."""
    return None if argument is None else invert_permutation(argument)
