"""A symbolic graph as plain values that say all of it: equal in every process that captures the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.bucketing.size_expressions import size_of
from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.overloads import HigherOrderOperator, OpOverload, stable_name
from dynaxla.torch_api.symbols import Symbolic, describe_known_sizes

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class CannotList(Exception):
    """Something in a graph is of this process alone; the text says what."""


def graph_listing(graph: Graph) -> tuple[object, ...]:
    """What the nodes call, of what, and what torch says of the results; and what guards say of the sizes.

    What sizes were in the call that was captured is left out, as are the lines of the user's program. A sub-graph, or a
    tensor that is held, is listed with all it has.

    Raises:
        CannotList: a node holds a value of a kind that is not known here.
    """
    lister = _Lister(graph)
    nodes = tuple(lister.node(node) for node in graph.nodes)
    return nodes, lister.sizes()


class _Lister:
    def __init__(self, graph: Graph) -> None:
        self._numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._owner = graph.owning_module
        self._texts: dict[object, str] = {}
        self._any: Symbolic | None = None

    def node(self, node: Node) -> object:
        target = self._target(node)
        args = (self.value(node.args), self.value(node.kwargs)) if node.op != "placeholder" else ()
        return node.op, target, args, self.value(node.meta.get("val"))

    def sizes(self) -> tuple[tuple[str, ...], ...]:
        """What is known of the symbols; all sizes of a graph have one environment."""
        return () if self._any is None else tuple(tuple(sorted(told)) for told in describe_known_sizes(self._any))

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

    def _target(self, node: Node) -> object:
        if node.op in ("placeholder", "output"):
            return ""
        if node.op == "get_attr":
            return self._held(node)
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            return stable_name(node.target)
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            return "higher order", node.target.name()
        if node.op == "call_function" and isinstance(node.target, (FunctionType, BuiltinFunctionType)):
            return f"{node.target.__module__}.{node.target.__qualname__}"
        raise CannotList(f"{node.format_node()} does not say all of what it calls")

    def _held(self, node: Node) -> object:
        """What the graph's module has under the name that a node tells."""
        held: object = self._owner
        for name in str(node.target).split("."):
            held = getattr(held, name, None)
        if isinstance(held, GraphModule):
            return "graph", graph_listing(held.graph)
        if isinstance(held, torch.Tensor) and type(held) in (torch.Tensor, torch.nn.Parameter):
            return "held", self._tensor(held), _content(held)
        raise CannotList(f"{node.format_node()} holds a {type(held).__name__}")

    def _text(self, size: object) -> str:
        """An expression, with what is assumed of its symbols."""
        if size not in self._texts:
            self._texts[size] = sympy.srepr(size)
        return self._texts[size]


def _content(tensor: torch.Tensor) -> bytes:
    """The elements, row-major."""
    with disable_modes():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
