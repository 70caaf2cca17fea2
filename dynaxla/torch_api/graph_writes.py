"""What a graph of Dynamo's writes to, and the views through which AOTAutograd would write otherwise than eager.

A graph of Dynamo's calls functions without schemas, so that writes are told by their names and arguments.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaxla.torch_api.fakes import captured_value, memory_of
from dynaxla.torch_api.symbols import example


def find_written_memory(module: GraphModule) -> set[int]:
    """The memory of tensors to which a graph may write, and of more."""
    nodes = module.graph.nodes
    written = (operand for node in nodes for find in (_written, _may_be_written) for operand in find(node))
    values = (unwrap(captured_value(operand)) for operand in written)
    return {memory_of(value) for value in values if is_plain(value)}


def writes_to_an_overlap(module: GraphModule) -> bool:
    """Whether a graph writes to a tensor several of whose elements lie in one place, such as an expanded one, or to a part,
    or to another view through which AOTAutograd writes otherwise than eager.

    Eager fills these, and raises for most other writes to the whole. AOTAutograd makes the write to a copy and adds, over the
    elements of one place, how much it changed them: it fills with the wrong number, and a part with one that is rounded.
    Through `unfold` it makes zeros of what lies between the windows, and `unsafe_chunk` it takes for a copy.
    """
    views = _find_written_views(module)
    lossy = (name_of(node) in _LOSSY for node in views if node.target is not torch.nn.functional.unfold)  # a copy
    return any(lossy) or any(has_overlap(value) for value in views.values())


def drop_inactive_dropouts(module: GraphModule) -> None:
    """Removes calls of dropout that give their operand itself, as in evaluation, of which AOTAutograd makes copies."""
    for part in find_parts(module):
        changed = [node for node in part.graph.nodes if node.target in _DROPOUTS and _is_inactive(node)]
        for node in changed:
            node.replace_all_uses_with(node.args[0])
            part.graph.erase_node(node)
        if changed:
            part.recompile()


def _is_inactive(node: Node) -> bool:
    """Whether a call of dropout has its numbers by place, and drops nothing."""
    given: dict[str, Any] = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    rate, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    is_zero = isinstance(rate, (int, float)) and rate == 0
    return bool(node.args) and (training is False or is_zero)


def unsqueeze_written_expansions(module: GraphModule) -> None:
    """Writes expansions that repeat nothing, as of a batch of one, as `x[None]` where a graph writes to them.

    AOTAutograd adds to an expanded tensor how much a write changes it, which is rounded, and NaN where it was infinite.
    """
    views = _find_written_views(module)
    changed = [node for node, value in views.items() if name_of(node) in _EXPANSIONS and not has_overlap(value)]
    for node in changed:
        source: Any = node.args[0]
        added = captured_value(node).dim() - captured_value(source).dim()
        node.op, node.target, node.kwargs = "call_function", operator.getitem, {}
        node.args = (source, (None,) * added + (...,))
    for part in find_parts(module) if changed else ():
        part.recompile()


def _find_written_views(module: GraphModule) -> dict[Node, torch.Tensor]:
    """The tensors that a graph writes to, and those that they are views of, with their values."""
    nodes = (node for part in find_parts(module) for node in part.graph.nodes)
    waiting, found = [operand for node in nodes for operand in _written(node)], dict[Node, torch.Tensor]()
    while waiting:
        node = waiting.pop()
        value = unwrap(captured_value(node))
        if node not in found and is_plain(value):
            found[node] = value
            several = [each for each in node.all_input_nodes if isinstance(captured_value(each), (tuple, list))]
            found |= dict.fromkeys(several, value)  # such as a split, which gives several views
            sources = [each for call in (node, *several) for each in call.all_input_nodes]
            waiting += [each for each in sources if _shares_memory(unwrap(captured_value(each)), value)]
    return found


def _shares_memory(value: Any, view: torch.Tensor) -> bool:
    return is_plain(value) and memory_of(value) == memory_of(view)


def find_parts(module: GraphModule) -> Iterator[GraphModule]:
    """A graph, and those within it, such as of a checkpoint or of a branch."""
    return (each for each in module.modules() if isinstance(each, GraphModule))


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor with strides, of no subclass, and wrapped by no transform of functions."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not is_traceable_wrapper_subclass(value) and not is_functorch_wrapped_tensor(value)


def unwrap(value: Any) -> Any:
    """The tensor that transforms of functions have wrapped. Relies on `torch._C._functorch`."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def has_overlap(value: torch.Tensor) -> bool:
    """Whether elements of a tensor may lie in one place: not if each stride steps over all that smaller ones reach."""
    sizes, strides = (list(map(example, numbers)) for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides or 0 in sizes:
        return False
    reached = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


def name_of(node: Node) -> str:
    """The name of the function, method or operator that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _written(node: Node) -> Iterator[Node]:
    """The operands that a call writes to."""
    if not node.op.startswith("call_"):
        return
    if isinstance(node.target, OpOverload):
        yield from _written_by_schema(node, node.target)
        return
    if "out" in node.kwargs:
        yield from _nodes_of(node.kwargs["out"])
    name = name_of(node)
    is_in_place = name.endswith("_") and not name.endswith("__") and not _is_of_operator(node.target)
    if node.args and (name in _WRITING or is_in_place or _is_told_to(node)):
        yield from _nodes_of(node.args[0])


def _is_of_operator(target: Any) -> bool:
    """Whether a function is one of `operator`, such as `and_` and `or_`, which write to nothing for all their names."""
    return getattr(operator, getattr(target, "__name__", ""), None) is target


def _written_by_schema(node: Node, target: OpOverload) -> Iterator[Node]:
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes_of(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name))


def _nodes_of(argument: Any) -> Iterator[Node]:
    yield from (
        each for each in (argument if isinstance(argument, (list, tuple)) else (argument,)) if isinstance(each, Node)
    )


def _is_told_to(node: Node) -> bool:
    """Whether a function is told to write by its argument `inplace`."""
    place = None if isinstance(node.target, str) else _place_of_inplace(node.target)
    return node.kwargs.get("inplace") is True or (
        place is not None and place < len(node.args) and node.args[place] is True
    )


@cache
def _place_of_inplace(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtin functions have no signatures
        return None
    return names.index("inplace") if "inplace" in names else None


def _may_be_written(node: Node) -> Iterator[Node]:
    """The operands of a call of which it is not told whether it writes to them."""
    target = node.target
    may_write = (
        isinstance(target, HigherOrderOperator)
        or (isinstance(target, OpOverloadPacket) and any(each._schema.is_mutable for each in _overloads(target)))
        or node.op == "call_module"
        or any(given is True for given in (*node.args, *node.kwargs.values()))  # as of batch_norm, in training
    )
    if node.op.startswith("call_") and may_write:
        yield from node.all_input_nodes


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]


_LOSSY = frozenset(
    "unfold meshgrid broadcast_tensors unsafe_chunk unsafe_split unsafe_split_with_sizes".split()
)  # views of several results expand within
_EXPANSIONS = frozenset(("expand", "expand_as", "broadcast_to"))
_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)
_IN_PLACE = {
    name for name in vars(operator) if name.startswith("i") and {name[1:], f"{name[1:]}_"} & set(vars(operator))
}
_WRITING = {"setitem", "__setitem__", *_IN_PLACE, *(f"__{name}__" for name in _IN_PLACE)}
"""The functions of `operator` that write: those like iadd and ior, beside add and or_."""
