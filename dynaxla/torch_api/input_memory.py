"""The memory of inputs of a graph of Dynamo's: what the graph gives them, `x.data = y`, and what captures take for granted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _get_data_attr  # type: ignore[attr-defined]
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.fx import GraphModule, Node

from dynaxla.torch_api.fakes import captured_value, memory_of
from dynaxla.torch_api.graph_writes import find_parts, find_written_memory, is_plain, name_of, unwrap

_TAKES_VERSION_BACK = "_lower_version_count_by_1"  # a local function of Dynamo's


def drop_own_memory(module: GraphModule) -> None:
    """Removes `x.data = x.to(...)` of inputs, where the conversion gives `x` itself. `layer.to(x.device)` in a forward is one
    for each parameter, though the layer is there already."""
    graph, is_changed = module.graph, False
    for node in graph.find_nodes(op="call_function", target=torch.Tensor.set_):
        if not _gives_itself(node):
            continue
        for user in list(node.users):
            if getattr(user.target, "__name__", "") == _TAKES_VERSION_BACK:
                graph.erase_node(user)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        is_changed = True
    if is_changed:
        module.recompile()


def _gives_itself(node: Node) -> bool:
    given, *values = node.args
    if not isinstance(given, Node) or given.op != "placeholder" or len(values) != 1:
        return False
    value: Any = values[0]
    while isinstance(value, Node) and value is not given and _is_no_conversion(value, captured_value(given)):
        value = value.args[0]
    return value is given


def _is_no_conversion(node: Node, given: Any) -> bool:
    """Whether a call gives its tensor, which is like `given`, or another one of the same memory."""
    if node.target is _get_data_attr:
        return True
    if node.op != "call_method" or node.target != "to" or not node.kwargs.keys() <= {"device", "dtype", "non_blocking"}:
        return False
    return all(_is_like(option, given) for option in (*node.args[1:], *node.kwargs.values()))


def _is_like(option: Any, given: torch.Tensor) -> bool:
    """Whether an argument of `to` asks for nothing that the tensor has not."""
    if isinstance(option, Node):
        other = captured_value(option)
        return isinstance(other, torch.Tensor) and (other.device, other.dtype) == (given.device, given.dtype)
    if isinstance(option, (torch.device, str)):
        return torch.device(option) == given.device
    return option is None or option is False or option is given.dtype


@dataclass(frozen=True, slots=True)
class InputMemory:
    """What a capture takes for granted of where its inputs lie, and none of Dynamo's guards asks: AOTAutograd looks at it once.

    Attributes:
        placed: inputs whose place in their storage counts, as `as_strided` with an offset counts from the storage's start.
        shared: inputs some of which the graph writes to: those that overlap are captured as views of one tensor.
        gives_views: whether the graph returns views of these, which AOTAutograd takes of that one tensor in place of the input.
    """

    placed: tuple[int, ...]
    shared: tuple[int, ...]
    gives_views: bool = False

    def is_captured(self, facts: tuple[object, ...]) -> bool:
        """Whether a capture with inputs of these facts, those of `read`, computes what the graph does."""
        return not (self.gives_views and facts[1])

    def read(self, inputs: Sequence[Any]) -> tuple[object, ...]:
        """The facts of a call's inputs, which are those of the capture's where its graph computes the same of both.

        Relies on `compute_overlapping_tensors`, by which AOTAutograd decides.
        """
        places = tuple(inputs[i].storage_offset() for i in self.placed)
        memories: dict[int, list[int]] = defaultdict(list)
        for i in self.shared:
            memories[memory_of(inputs[i])].append(i)
        if len(memories) == len(self.shared):
            return places, ()
        overlaps = []
        for found in memories.values():
            numbers = compute_overlapping_tensors([inputs[i] for i in found], symbolic=False) if len(found) > 1 else ()
            overlaps.append([(found[number], inputs[found[number]].storage_offset()) for number in sorted(numbers)])
        return places, tuple(map(tuple, filter(None, overlaps)))


def find_input_memory(module: GraphModule) -> InputMemory | None:
    """What the capture of a graph will take for granted of its inputs' memory; None for nothing, as of nearly all graphs.

    Parameters and buffers, and what else torch knows to keep its memory, are left out of `shared`. Relies on
    `meta["tensor_dict"]` of placeholders, with `_dynamo_static_input_type`.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    tensors = {i: node for i, node in enumerate(nodes) if is_plain(captured_value(node))}
    placed = tuple(tensors) if any(map(_has_offset, _strided_views(module))) else ()
    moving = {i: memory_of(captured_value(node)) for i, node in tensors.items() if not _is_static(node)}
    shared = tuple(moving) if len(moving) > 1 and not find_written_memory(module).isdisjoint(moving.values()) else ()
    gives_views = bool(shared) and any(
        node not in nodes and is_plain(value := captured_value(node)) and memory_of(value) in moving.values()
        for node in module.graph.output_node().all_input_nodes
    )
    return InputMemory(placed, shared, gives_views) if placed or shared else None


def writes_at_a_place(module: GraphModule) -> bool:
    """Whether a graph writes to a part of an input's storage, counted from the storage's start, and AOTAutograd takes the
    input's own start for that: of an input that begins later and requires a gradient."""
    if not torch.is_grad_enabled() or not any(map(_has_offset, _strided_views(module))):
        return False
    values = [captured_value(node) for node in module.graph.find_nodes(op="placeholder")]
    inner = [each for each in values if is_plain(each) and each.requires_grad and not _starts_storage(each)]
    return not find_written_memory(module).isdisjoint(map(memory_of, inner))


def _starts_storage(value: torch.Tensor) -> bool:
    offset = value.storage_offset()
    return type(offset) is int and offset == 0


def _is_static(node: Node) -> bool:
    kept = node.meta.get("tensor_dict") or {}
    return isinstance(captured_value(node), torch.nn.Parameter) or "_dynamo_static_input_type" in kept


def find_strided_inputs(module: GraphModule) -> list[torch.Tensor]:
    """The plain inputs of which a graph has `as_strided` views, as captured; all of them if a graph within has such views."""
    memories = {memory_of(value) for value in map(_viewed, _strided_views(module)) if value is not None}
    is_within = any(node.graph is not module.graph for node in _strided_views(module))
    inputs = filter(is_plain, map(captured_value, module.graph.find_nodes(op="placeholder")))
    return [value for value in inputs if is_within or memory_of(value) in memories]


def _viewed(node: Node) -> torch.Tensor | None:
    """What an `as_strided` views, where that is known."""
    owner = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    value = unwrap(captured_value(owner)) if isinstance(owner, Node) else None
    return value if is_plain(value) else None


def _strided_views(module: GraphModule) -> Iterator[Node]:
    """The calls of `as_strided`, and of variants of it, in a graph and those within it, such as of a checkpoint."""
    nodes = (node for part in find_parts(module) for node in part.graph.nodes)
    return (node for node in nodes if node.op.startswith("call_") and "as_strided" in name_of(node))


def _has_offset(node: Node) -> bool:
    before = 4 if "scatter" in name_of(node) else 3
    return any(offset is not None for offset in (*node.args[before:], node.kwargs.get("storage_offset")))
