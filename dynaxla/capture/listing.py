"""A symbolic graph as plain values that say all of it: equal in every process that captures the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from dynaxla.bucketing.sizes import size_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import Symbolic, known_of_sizes

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class CannotList(Exception):
    """Something in a graph is of this process alone; the text says what."""


def graph_listing(graph: Graph) -> tuple[object, ...]:
    """What the nodes call, of what, and what torch says of the results; and what guards say of the sizes.

    What sizes were in the call that was captured is left out, as are the lines of the user's program.

    Raises:
        CannotList: a node calls a sub-graph or holds a value of a kind that is not known here.
    """
    lister = _Lister({node: number for number, node in enumerate(graph.nodes)})
    nodes = tuple(lister.node(node) for node in graph.nodes)
    return nodes, lister.sizes()


class _Lister:
    def __init__(self, numbers: Mapping[Node, int]) -> None:
        self._numbers = numbers
        self._texts: dict[object, str] = {}
        self._any: Symbolic | None = None

    def node(self, node: Node) -> object:
        target = self._target(node)
        args = (self.value(node.args), self.value(node.kwargs)) if node.op != "placeholder" else ()
        return node.op, target, args, self.value(node.meta.get("val"))

    def sizes(self) -> tuple[tuple[str, ...], ...]:
        """What is known of the symbols; all sizes of a graph have one environment."""
        return () if self._any is None else tuple(tuple(sorted(told)) for told in known_of_sizes(self._any))

    def value(self, value: Any) -> object:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Node():
                return "node", self._numbers[value]
            case torch.Tensor():
                return self._tensor(value)
            case tuple() | list():
                return [self.value(each) for each in value]
            case dict():
                return [(self.value(name), self.value(each)) for name, each in value.items()]
            case slice():
                return "slice", [self.value(each) for each in (value.start, value.stop, value.step)]
            case complex():
                return "complex", value.real, value.imag
            case _ if isinstance(value, _SYMBOLIC):
                self._any = value
                return "size", type(value).__name__, self._text(size_of(value))
            case _ if isinstance(value, _NAMED):
                return type(value).__name__, str(value)
        raise CannotList(f"a {type(value).__name__} in the graph is not known to say all of itself")

    def _tensor(self, tensor: torch.Tensor) -> object:
        if tensor.layout is not torch.strided:
            raise CannotList(f"a tensor in the graph is {tensor.layout}")
        numbers: Iterable[Sequence[Any]] = (tensor.shape, tensor.stride(), (tensor.storage_offset(),))
        sizes = [self.value(list(each)) for each in numbers]
        return "tensor", str(tensor.dtype), str(tensor.device), tensor.requires_grad, *sizes

    def _target(self, node: Node) -> str:
        if node.op in ("placeholder", "output"):
            return ""
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            return str(node.target)
        if node.op == "call_function" and isinstance(node.target, (FunctionType, BuiltinFunctionType)):
            return f"{node.target.__module__}.{node.target.__qualname__}"
        raise CannotList(f"{node.format_node()} does not say all of what it calls")

    def _text(self, size: object) -> str:
        """An expression, with what is assumed of its symbols."""
        if size not in self._texts:
            self._texts[size] = sympy.srepr(size)
        return self._texts[size]
