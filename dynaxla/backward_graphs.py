"""The graphs of a backward: one for each set of the forward's results that nothing is differentiated of.

The gradients of such results are undefined. Eager PyTorch runs a formula of autograd if a gradient comes to it, so what depends
on undefined gradients alone is left out. With zeros for these gradients it is not always zero: the zero may meet an infinite
slope, and 0 * inf is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.fx.edit import call_before, insert_zeros
from dynaxla.fx.graph_utils import copy_graph
from dynaxla.isolation.forking import new_lock
from dynaxla.passes.manager import CapturedGraph, GraphFunction
from dynaxla.torch_api.modules import graph_module
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.undefined_gradients import Undefined
from dynaxla.types import GRADIENT_SUM, OWN_BACKWARD, BackwardInputs

aten = torch.ops.aten

Build = Callable[[CapturedGraph], GraphFunction]

MAX_BUILT = 8
"""So many graphs of a backward are compiled; those of further sets run in eager."""

_FACTORY = re.compile(r"(new_(full|ones|empty)|(full|ones|empty|rand|randn|randint)_like)")
"""The names of ops that read the sizes and dtype of an operand alone, and give no zeros."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class BackwardFunction:
    """Calls the graph for the gradients that a call defines; others are given as `Undefined`. It is built at its first call.

    Args:
        read: gives the backward as captured. It is not changed.
        gradients: positions of its inputs that are gradients.
        build: makes the function of a graph.
        make_eager: makes that of a graph that is one too many, and says so.
    """

    def __init__(
        self, read: Callable[[], CapturedGraph], gradients: tuple[int, ...], build: Build, make_eager: Build
    ) -> None:
        self._read, self._gradients = read, gradients
        self._build, self._make_eager = build, make_eager
        self._functions: dict[frozenset[int], GraphFunction] = {}
        self._lock = new_lock()

    def __call__(self, args: list[Any]) -> list[Any]:
        undefined = frozenset([i for i in self._gradients if type(args[i]) is Undefined])
        function = self._functions.get(undefined)
        return (self._find(undefined) if function is None else function)(args)

    def add(self, inputs: BackwardInputs, function: GraphFunction) -> None:
        """Adds the function of the graph of a set, which takes the inputs that are kept."""
        self._functions[inputs.undefined] = _keep_inputs(function, inputs) if inputs.undefined else function

    def _find(self, undefined: frozenset[int]) -> GraphFunction:
        with self._lock:
            if undefined not in self._functions:
                self._functions[undefined] = self._make(undefined)
            return self._functions[undefined]

    def _make(self, undefined: frozenset[int]) -> GraphFunction:
        graph = self._read()
        if undefined and len(undefined) == len(self._gradients):
            results: Any = graph.module.graph.output_node().args[0]
            return lambda _: [None] * len(results)
        reduced = leave_out_undefined(graph, undefined)
        make = self._build if len(self._functions) < MAX_BUILT else self._make_eager
        return _keep_inputs(make(reduced.graph), reduced.inputs)


def _keep_inputs(function: GraphFunction, inputs: BackwardInputs) -> GraphFunction:
    """Makes a function of all inputs of one that takes those that are kept."""
    kept = inputs.kept

    def run(args: list[Any]) -> list[Any]:
        return function([each.make_zeros() if type(each) is Undefined else each for each in [args[i] for i in kept]])

    return run


@dataclass(frozen=True, slots=True)
class ReducedBackward:
    """A backward without what undefined gradients alone determine.

    Attributes:
        graph: gives None for a gradient that is undefined in turn.
        inputs: which inputs of the backward are the graph's, in order.
    """

    graph: CapturedGraph
    inputs: BackwardInputs


def leave_out_undefined(graph: CapturedGraph, undefined: frozenset[int]) -> ReducedBackward:
    """Makes of a backward, which stays as it is if it has several gradients, that for gradients of which some are undefined.

    Args:
        undefined: the positions of these gradients among the inputs.
    """
    if not undefined and len(graph.gradients) < 2:  # no other set is asked for
        count = len(graph.module.graph.find_nodes(op="placeholder"))
        return ReducedBackward(graph, BackwardInputs(graph.gradients, undefined, tuple(range(count))))
    copy = copy_graph(graph.module.graph)
    inputs = copy.find_nodes(op="placeholder")
    sides = _Sides({inputs[i] for i in undefined}, {inputs[i] for i in graph.gradients if i not in undefined})
    sides.divide(copy)
    output = copy.output_node()
    gradients: Any = output.args[0]
    output.args = (tuple(None if each in sides.undefined else each for each in gradients),)
    for node in reversed(copy.nodes):
        if node in sides.undefined and not node.users:  # also ops with an effect, such as checks
            copy.erase_node(node)
    copy.eliminate_dead_code()
    left = set(copy.nodes)
    kept = tuple(i for i, node in enumerate(inputs) if node in left)
    reduced = replace(graph, module=graph_module(graph.module, copy))
    return ReducedBackward(reduced, BackwardInputs(graph.gradients, undefined, kept))


@dataclass(slots=True)
class _Sides:
    """The two sides of a backward: the values that depend on undefined gradients alone, and those that depend on others too.

    Attributes:
        undefined: those values, at first the undefined gradients.
        defined: the others, at first the other gradients.
        filled: by values of `undefined`, zeros in their place, for what depends on other gradients too.
    """

    undefined: set[Node]
    defined: set[Node]
    filled: dict[Node, Node] = field(default_factory=dict)

    def divide(self, graph: Graph) -> None:
        """Finds the side of each node. What depends on both gets zeros for what is undefined."""
        called = self._find_called(graph)
        for node in list(graph.nodes):
            operands = _read_by(node)
            undefined = [
                each for each in operands if each in self.undefined
            ]  # in order: it decides on keys of programs
            if not self.defined.isdisjoint(operands) or (undefined and node.meta.get(OWN_BACKWARD) in called):
                self.defined.add(node)
                self._fill(node, undefined)
            elif undefined and self._is_constant_sum(node):
                self._fill(node, undefined)
            elif undefined:
                self.undefined.add(node)

    def _is_constant_sum(self, node: Node) -> bool:
        """Whether a gradient that reads no other, as that of `x ** 0`, is added to an undefined one."""
        return GRADIENT_SUM in node.meta and _find_summand(node, self.undefined) is not None

    def _find_called(self, graph: Graph) -> set[int]:
        """The users' own backwards that are called, since a gradient comes to them. They get zeros for undefined ones."""
        reached, called = set(self.defined), set[int]()
        for node in graph.nodes:
            if not reached.isdisjoint(_read_by(node)):
                reached.add(node)
                called.add(node.meta.get(OWN_BACKWARD, -1))
        return called

    def _fill(self, node: Node, undefined: Sequence[Node]) -> None:
        if undefined and (summand := _find_summand(node, undefined)) is not None:
            node.replace_all_uses_with(summand)
            return
        for operand in undefined:
            if _is_factory(operand):
                continue
            if operand not in self.filled:
                self.filled[operand] = _make_zeros(operand, node)
            node.replace_input_with(operand, self.filled[operand])


def _read_by(node: Node) -> list[Node]:
    """The nodes that a node reads, but for sizes."""
    reads_sizes = node.op != "call_function" or isinstance(node.meta.get("val"), _NUMBERS)
    return [] if reads_sizes else node.all_input_nodes


def _is_factory(node: Node) -> bool:
    """Whether a node has no element of its operand's, and is no zeros."""
    return isinstance(node.target, OpOverload) and bool(_FACTORY.match(node.target.overloadpacket.__name__))


def _find_summand(node: Node, undefined: Collection[Node]) -> Node | None:
    """The other summand of a sum with what is undefined, if it is the sum."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    others = [each for each in node.args if each not in undefined]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None
    value, result = others[0].meta["val"], node.meta["val"]
    return others[0] if value.dtype == result.dtype and value.shape == result.shape else None


def _make_zeros(operand: Node, reader: Node) -> Node:
    """Zeros of the shape of a value, in front of the first node that reads them. Where sizes vary they are read of the value,
    which no program computes for that."""
    value = operand.meta["val"]
    if all(isinstance(size, int) for size in value.shape):
        return insert_zeros(reader, value)
    return call_before(reader.graph, reader, aten.zeros_like.default, (operand,))
