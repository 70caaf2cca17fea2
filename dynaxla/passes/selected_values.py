"""Values that are compared with what was selected of them are computed once.

`x >= x.topk(k).values[..., -1:]` chooses k elements, as each is equal to itself. A compiler that computes `x` again in the
loop of each op that reads it may round it otherwise there: a processor multiplies and adds in one step, of two products the
one or the other. So `x` gets memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.barrier import MATERIALIZE
from dynaxla.fx.edit import insert_before, is_view
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext

aten = torch.ops.aten

_COMPARISONS = (aten.eq.Tensor, aten.ne.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor)
_SELECTIONS = (
    *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default, aten.mode.default),
    *(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.max.dim, aten.min.dim),
    *(aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim),
    *(aten.cummax.default, aten.cummin.default, aten.aminmax.default),
    *(aten.gather.default, aten.index.Tensor, aten.index_select.default),
)
_FROM_FIRST = (
    *(aten.clone.default, aten.flip.default, aten.roll.default, aten.repeat.default),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.constant_pad_nd.default),
)
_FROM_LAST = (
    *(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.maximum.default, aten.minimum.default),
    aten.copy.default,
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def keep_selected(graph: Graph) -> None:
    """Gives memory to the values of a graph that are compared with what was selected of them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = (_compared(node, order) for node in graph.nodes if node.target in _COMPARISONS)
    for node in dict.fromkeys(node for node in found if node is not None):
        readers = list(node.users)
        stored = insert_before(node.next, MATERIALIZE, (node,), {}, node.meta["val"])
        for reader in readers:
            reader.replace_input_with(node, stored)


def _compared(comparison: Node, order: dict[Node, int]) -> Node | None:
    """The latest computed value that both operands of a comparison are elements of, one of them by a selection."""
    left, right = (_origins(operand) for operand in comparison.args[:2])
    latest = max(left.keys() & right.keys(), key=order.__getitem__, default=None)
    if latest is None or not (left[latest] or right[latest]) or latest.op != "call_function" or not _is_float(latest):
        return None
    return latest if any(node.op == "call_function" and not _elements_of(node) for node in _origins(latest)) else None


def _origins(operand: object) -> dict[Node, bool]:
    """The nodes that the elements of an operand are of, each with whether a selection is between; the operand among them."""
    found: dict[Node, bool] = {}
    left = [(operand, False)] if isinstance(operand, Node) else []
    while left:
        node, is_selected = left.pop()
        if is_selected > found.get(node, -1):
            found[node] = is_selected
            left.extend((each, is_selected or node.target in _SELECTIONS) for each in _elements_of(node))
    return found


def _elements_of(node: Node) -> Sequence[Node]:
    """The operands of which a node gives elements as they are."""
    if node.op != "call_function":
        return ()
    operands: Sequence[object] = ()
    if node.target in _FROM_LAST:
        operands = node.args[-2:]
    elif node.target in _SELECTIONS or node.target in _FROM_FIRST or node.target is operator.getitem or is_view(node):
        operands = node.args[:1]
    return [each for each in operands if isinstance(each, Node)]


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATS


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    keep_selected(graph.module.graph)
    return graph


PASS = Pass("selected_values", _run, "values that are compared with what was selected of them are computed once")
