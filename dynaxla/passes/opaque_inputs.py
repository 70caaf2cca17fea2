"""Inputs and constants that are objects, such as the mesh of a DTensor, taken out of a graph whose ops do not read them.

AOTAutograd flattens a tensor subclass into its tensors and its objects, and a forward hands those objects on to its backward.
What an op reads stays: such an op runs in eager. With the ragged size of a jagged tensor go the inputs that only carry
numbers, such as the least length of its rows, which is the size of a tensor without elements: programs are not made for each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule

from dynaxla.fx.graph_utils import attribute, opaque_class_of
from dynaxla.partition.opaque_values import OpaqueValues
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.fakes import find_opaque_class
from dynaxla.torch_api.symbols import is_ragged


def take_opaque_inputs(module: GraphModule) -> OpaqueValues:
    """Takes the objects that no op reads out of a graph's inputs and constants; the graph gives None for them."""
    graph = module.graph
    output = graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)):
        return OpaqueValues()
    unread = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder")) if set(n.users) <= {output}}
    given = {node: i for node, i in unread.items() if opaque_class_of(node) is not None}
    if any(is_ragged(node.meta.get("val")) for node in given):
        given = {node: i for node, i in unread.items() if node in given or _is_number(node.meta.get("val"))}
    read = {node: attribute(module, node) for node in graph.find_nodes(op="get_attr") if set(node.users) <= {output}}
    own = {node: value for node, value in read.items() if find_opaque_class(value) is not None}
    output.args = (tuple(None if item in given or item in own else item for item in returned),)
    for node in (*given, *own):
        graph.erase_node(node)
    module.recompile()
    outputs, constants = (
        tuple((place, found[item]) for place, item in enumerate(returned) if item in found) for found in (given, own)
    )
    return OpaqueValues(tuple(given.values()), outputs, constants)


def _is_number(value: object) -> bool:
    """Whether a value is a size, or a tensor without elements whose sizes alone say something."""
    return not isinstance(value, Tensor) or any(isinstance(size, int) and size == 0 for size in value.shape)


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
