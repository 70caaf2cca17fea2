"""Writes into part of an input, as a key-value cache gets them: torch makes them in the input's own memory.

AOTAutograd makes such a write a new tensor, which it copies back; the new tensor is a copy in the executable too, since
PJRT takes no buffer for its own that it did not allocate (docs/performance.md). Where nothing else reads the input before
the write, the executable that computes what is written ends there, torch writes, and what reads the input afterwards is
the next executable. The time of a step then grows with what is written, not with the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from dynaxla.decompositions.assertions import find_assertions
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api import symbols
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.types import DEVICE_TYPE, IN_PLACE

aten = torch.ops.aten

LEAST_BYTES = 1 << 19
"""Smaller inputs are copied: that takes less time than another executable does to start."""

_WRITES: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        aten.copy.default: aten.copy_.default,
        aten.index_put.default: aten.index_put_.default,
        aten.index_copy.default: aten.index_copy_.default,
        aten.scatter.src: aten.scatter_.src,
        aten.scatter.value: aten.scatter_.value,
        aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    }
)
_VIEW_OF: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
)
Path = tuple[tuple[OpOverload, tuple[Any, ...]], ...]
"""Views, the first of an input, each of the one before: op and arguments behind the tensor."""


@dataclass(frozen=True, slots=True)
class InPlaceWrite:
    """One in-place op on a view of an input.

    Attributes:
        op: the in-place op, and its arguments behind the tensor.
        consumed: the functional nodes that it stands for.
    """

    path: Path
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    consumed: tuple[Node, ...]


def get_written_base(base: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    """The tensor, once a view of it was written to."""
    del write
    return base


def write_in_place(module: GraphModule, inputs: GraphInputs | None) -> None:
    """Turns the writes into parts of inputs, where they can be, into in-place ops that have `meta[IN_PLACE]`.

    Args:
        module: a graph without a backward, whose results begin with the new values of the inputs that it writes to.
        inputs: what AOTAutograd knows of its inputs, or None.
    """
    if inputs is None:
        return
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for changed in inputs.writes:
        base, value = placeholders[changed.input], graph.output_node().args[0][changed.result]  # type: ignore[index]
        if changed.data and not changed.metadata and _is_large(base):
            write = _write(base, value, ())
            if write is None or _is_asserted_before(graph, write.consumed[-1]):
                continue
            if _reads_nothing_else(base, write.consumed):
                last = write.consumed[-1]
                last.replace_all_uses_with(_insert(graph, base, last, write))
    graph.eliminate_dead_code()
    module.recompile()


def _is_asserted_before(graph: Graph, node: Node) -> bool:
    """Whether the graph may raise before it comes to a node: a write behind that must not have been made."""
    return any(assertion < node for assertion in find_assertions(graph))


def _is_large(node: Node) -> bool:
    """Whether the input is, at the sizes that the graph was captured for."""
    value = node.meta["val"]
    return math.prod(map(symbols.example, value.shape)) * value.itemsize >= LEAST_BYTES  # type: ignore[no-any-return]


def _write(base: Node, value: Any, path: Path) -> InPlaceWrite | None:
    """The write that makes the view of `base` on this path equal to `value`; None if it is no known one."""
    if (
        not isinstance(value, Node)
        or value.op != "call_function"
        or not value.args
        or _path(value.args[0], base) != path
    ):
        return None
    if value.target in _VIEW_OF and not value.kwargs:
        source, where = value.args[1], value.args[2:]
        inside = (*path, (_VIEW_OF[value.target], where))  # type: ignore[index]
        inner = _write(base, source, inside) or InPlaceWrite(inside, aten.copy_.default, (source,), {}, ())
        return replace(inner, consumed=(*inner.consumed, value))
    accumulates = value.target is aten.index_put.default and any(value.args[3:])
    if value.target not in _WRITES or accumulates or (not path and value.target is aten.copy.default):
        return None
    return InPlaceWrite(path, _WRITES[value.target], value.args[1:], value.kwargs, (value,))  # type: ignore[index]


def _path(node: Any, base: Node) -> Path | None:
    if node is base:
        return ()
    if not isinstance(node, Node) or node.target not in _VIEW_OF.values() or node.kwargs:
        return None
    before = _path(node.args[0], base)
    return None if before is None else (*before, (node.target, node.args[1:]))  # type: ignore[arg-type, return-value]


def _reads_nothing_else(node: Node, consumed: Sequence[Node]) -> bool:
    """Whether views of an input, and it, are nothing but what these nodes write to; the last one's value is free to read."""
    for user in node.users:
        written_to = user in consumed and user.args[0] is node and user.all_input_nodes.count(node) == 1
        reads = user.target not in _VIEW_OF.values() or not _reads_nothing_else(user, consumed)
        if not written_to and reads:
            return False
    return all(set(inner.users) <= set(consumed) for inner in consumed[:-1])


def _insert(graph: Graph, base: Node, value: Node, write: InPlaceWrite) -> Node:
    """The write in front of `value`; gives the node that stands for the input afterwards."""
    with graph.inserting_before(value):
        view = base
        for target, where in write.path:
            view = _mark(graph.call_function(target, (view, *where)), value)
            view.meta["val"] = target(*map_arg(view.args, lambda n: n.meta["val"]))
        written = _mark(graph.call_function(write.op, (view, *write.args), dict(write.kwargs)), value)
        written.meta["val"] = view.meta["val"]
        return _mark(graph.call_function(get_written_base, (base, written)), value) if write.path else written


def _mark(made: Node, value: Node) -> Node:
    made.meta = {**value.meta, IN_PLACE: True}
    return made


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if graph.kind == "inference" and context.device.type != DEVICE_TYPE:
        write_in_place(graph.module, graph.inputs)
    return graph


PASS = Pass(
    "in_place_writes",
    _run,
    "without a backward: writes into parts of large inputs in torch's memory, which PJRT cannot take, are in-place ops with "
    "`meta[IN_PLACE]`",
)
