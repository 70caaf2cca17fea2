"""Inputs that are objects, such as the mesh of a DTensor, taken out of a graph whose ops do not read them.

AOTAutograd flattens a tensor subclass into its tensors and its objects, and a forward hands those objects on to its backward.
What an op reads stays: such an op runs in eager.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch.fx import GraphModule, Node

from dynaxla.fx.graph_utils import opaque_class_of
from dynaxla.partition.opaque_values import OpaqueValues
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext


def take_opaque_inputs(module: GraphModule) -> OpaqueValues:
    """Takes the objects that no op reads out of a graph's inputs; the graph gives None for them."""
    graph = module.graph
    output = graph.output_node()
    returned = output.args[0]
    found = {
        node: i
        for i, node in enumerate(graph.find_nodes(op="placeholder"))
        if opaque_class_of(node) is not None and set(node.users) <= {output}
    }
    if not found or not isinstance(returned, (tuple, list)):
        return OpaqueValues()
    places = tuple(
        (place, found[item]) for place, item in enumerate(returned) if isinstance(item, Node) and item in found
    )
    output.args = (tuple(None if isinstance(item, Node) and item in found else item for item in returned),)
    for node in found:
        graph.erase_node(node)
    module.recompile()
    return OpaqueValues(tuple(found.values()), places)


def _renumber(positions: Collection[int], gone: Collection[int]) -> frozenset[int]:
    return frozenset(i - sum(each < i for each in gone) for i in positions)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    opaque = take_opaque_inputs(graph.module)
    return replace(graph, opaque=opaque, static_inputs=_renumber(graph.static_inputs, opaque.inputs))


PASS = Pass(
    "opaque_inputs",
    _run,
    "every input is a tensor or a number, or an op that runs in eager reads it: `opaque` has the other objects, and the graph "
    "gives None for them",
)
