"""The memory of inputs of a graph of Dynamo's: what the graph gives them, `x.data = y`, and what captures take for granted."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _get_data_attr  # type: ignore[attr-defined]
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaxla.torch_api.fakes import captured_value, memory_of

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
    """

    placed: tuple[int, ...]
    shared: tuple[int, ...]

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
    tensors = {i: node for i, node in enumerate(nodes) if _is_plain(captured_value(node))}
    placed = tuple(tensors) if any(map(_reads_at_a_place, module.graph.nodes)) else ()
    moving = {i: memory_of(captured_value(node)) for i, node in tensors.items() if not _is_static(node)}
    shared = tuple(moving) if len(moving) > 1 and not _written_memory(module.graph).isdisjoint(moving.values()) else ()
    return InputMemory(placed, shared) if placed or shared else None


def writes_at_a_place(module: GraphModule) -> bool:
    """Whether a graph writes to a part of an input's storage, counted from the storage's start, and AOTAutograd takes the
    input's own start for that: of an input that begins later and requires a gradient."""
    if not torch.is_grad_enabled() or not any(map(_reads_at_a_place, module.graph.nodes)):
        return False
    values = [captured_value(node) for node in module.graph.find_nodes(op="placeholder")]
    inner = [each for each in values if _is_plain(each) and each.requires_grad and not _starts_storage(each)]
    return not _written_memory(module.graph).isdisjoint(map(memory_of, inner))


def _starts_storage(value: torch.Tensor) -> bool:
    offset = value.storage_offset()
    return type(offset) is int and offset == 0


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not is_traceable_wrapper_subclass(value) and not is_functorch_wrapped_tensor(value)


def _is_static(node: Node) -> bool:
    kept = node.meta.get("tensor_dict") or {}
    return isinstance(captured_value(node), torch.nn.Parameter) or "_dynamo_static_input_type" in kept


def _reads_at_a_place(node: Node) -> bool:
    """Whether a call is `as_strided`, or a variant of it, with an offset."""
    if not node.op.startswith("call_") or "as_strided" not in _name_of(node):
        return False
    before = 4 if "scatter" in _name_of(node) else 3
    return any(offset is not None for offset in (*node.args[before:], node.kwargs.get("storage_offset")))


def _written_memory(graph: Graph) -> set[int]:
    """The memory of tensors to which a graph may write, and of more: Dynamo's graph calls functions without schemas."""
    values = (_unwrap(captured_value(written)) for node in graph.nodes for written in _written(node))
    return {memory_of(value) for value in values if _is_plain(value)}


def _unwrap(value: Any) -> Any:
    """The tensor that transforms of functions have wrapped. Relies on `torch._C._functorch`."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def _written(node: Node) -> Iterator[Node]:
    """The operands that a call may write to."""
    if not node.op.startswith("call_"):
        return
    target, name = node.target, _name_of(node)
    may_write_all = (
        isinstance(target, HigherOrderOperator)
        or (isinstance(target, OpOverload) and target._schema.is_mutable)
        or (
            isinstance(target, OpOverloadPacket) and any(overload._schema.is_mutable for overload in _overloads(target))
        )
        or node.op == "call_module"
        or any(given is True for given in (*node.args, *node.kwargs.values()))  # as inplace=True
        or "out" in node.kwargs
    )
    if may_write_all:
        yield from node.all_input_nodes
    elif node.args and (name in _WRITING or (name.endswith("_") and not name.endswith("__"))):
        first = node.args[0]
        yield from (n for n in (first if isinstance(first, (list, tuple)) else (first,)) if isinstance(n, Node))


_IN_PLACE = {
    name for name in vars(operator) if name.startswith("i") and {name[1:], f"{name[1:]}_"} & set(vars(operator))
}
_WRITING = {"setitem", "__setitem__", *_IN_PLACE, *(f"__{name}__" for name in _IN_PLACE)}
"""The functions of `operator` that write: those like iadd and ior, beside add and or_."""


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]


def _name_of(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
