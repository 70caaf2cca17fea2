"""What eager raises because of a value, a compiled graph raises too: an index out of range, a whole number divided by zero.

A program cannot raise. A check becomes an assertion (decompositions/assertions.py): the program says which one failed, and the
call raises before it returns. That waits for the program, so checks are made by default on the CPU alone, whose results
are waited for anyway. What is required is in ops/value_bounds.py; ops that are decomposed have their assertions from there
(passes/decomposed_checks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node, map_arg

from dynaxla.custom_ops.schema import arguments_of
from dynaxla.decompositions.assertions import describe_fault
from dynaxla.diagnostics import user_frame
from dynaxla.fx.edit import insert_before
from dynaxla.ops.value_bounds import Bounds, ValueBound, bounds_of
from dynaxla.passes.decomposed_checks import are_values_checked
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api import fakes
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.tracing import accept_symbolic_sizes, trace_calls

aten = torch.ops.aten


class _GraphChecks:
    """Puts assertions into a graph; of what several calls read alike one."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[Any, ...], Node] = {}
        self._asserted: set[Node] = set()
        self._known: set[tuple[Node, str, str]] = set()

    def check(self, node: Node, find_bounds: Bounds) -> None:
        """Puts the assertions of a call in front of it."""
        given = arguments_of(node)
        operands = dict.fromkeys(node.all_input_nodes)
        fakes_of = {operand: operand.meta["val"] for operand in operands}
        bounds = list(find_bounds(_values(given, fakes_of)))
        if not [bound for bound in bounds if self._is_new(bound, fakes_of)]:
            return
        if all(map(_has_plain_ends, bounds)):
            found: Iterable[Node] = [self._compute_within(node, bound, fakes_of) for bound in bounds]
        else:
            found = self._compute(node, list(operands), find_bounds)
        for bound, holds in zip(bounds, found, strict=True):
            if holds not in self._asserted:
                self._asserted.add(holds)
                self._assert(node, holds, bound)

    def _is_new(self, bound: ValueBound, fakes_of: Mapping[Node, Any]) -> bool:
        """Whether no earlier call requires the same of the same tensor. Remembers what this one requires."""
        if bound.prepare is not None:
            return True
        key = _operand(bound, fakes_of), str(bound.lowest), str(bound.highest)
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def _compute_within(self, node: Node, bound: ValueBound, fakes_of: Mapping[Node, Any]) -> Node:
        """What `_compute` gives for an operand and plain numbers. torch's fake kernels of symbolic sizes take 10 ms each, which
        this does without."""
        tensor = _operand(bound, fakes_of)
        with fakes.mode_of(bound.values):
            each = torch.empty_like(bound.values, dtype=torch.bool)
            whole = each.new_empty(())
        compared = [self._call(node, op, (tensor, end), each) for op, end in bound.comparisons(bound.values.dtype)]
        within = reduce(lambda one, other: self._call(node, aten.bitwise_and.Tensor, (one, other), each), compared)
        return self._call(node, aten.all.default, (within,), whole)

    def _compute(self, node: Node, operands: Sequence[Node], find_bounds: Bounds) -> Iterator[Node]:
        """Whether the bounds hold: bools of no dims, computed in front of the call."""

        def compute(*values: Any) -> list[Tensor]:
            given = _values(arguments_of(node), dict(zip(operands, values, strict=True)))
            return [bound.holds() for bound in find_bounds(given)]

        tensor = next(operand for operand in operands if isinstance(operand.meta["val"], Tensor))
        with fakes.mode_of(tensor.meta["val"]), accept_symbolic_sizes(), torch.no_grad():
            traced = trace_calls(compute, [_example(operand) for operand in operands], {})
        traced.graph.eliminate_dead_code()
        inlined: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
        for call in traced.graph.nodes:
            if call.op == "call_function":
                args, kwargs = map_arg((call.args, call.kwargs), inlined.__getitem__)
                inlined[call] = self._call(node, call.target, args, call.meta["val"], kwargs)
        return (inlined[holds] for holds in traced.graph.output_node().args[0])  # type: ignore[union-attr, index]

    def _call(self, node: Node, target: Any, args: Any, value: Any, kwargs: Any = MappingProxyType({})) -> Node:
        """A call in front of the node; that of an earlier check, if it computes the same."""
        key = target, str(args), str(kwargs)
        if key not in self._made:
            self._made[key] = insert_before(node, target, args, dict(kwargs), value)
        return self._made[key]

    def _assert(self, node: Node, holds: Node, bound: ValueBound) -> None:
        message = f"{describe_fault(bound)} ({_place(node)})"
        with self._graph.inserting_before(node):
            assertion = self._graph.call_function(aten._assert_async.msg, (holds, message))
        assertion.meta = {**holds.meta, "val": None}


def check_values(graph: Graph) -> None:
    """Puts assertions in front of the calls whose values eager may refuse."""
    checks = _GraphChecks(graph)
    for node in list(graph.nodes):
        find_bounds = bounds_of(str(node.target)) if isinstance(node.target, OpOverload) else None
        if find_bounds is not None:
            checks.check(node, find_bounds)


def _operand(bound: ValueBound, fakes_of: Mapping[Node, Any]) -> Node:
    return next(operand for operand, value in fakes_of.items() if value is bound.values)


def _has_plain_ends(bound: ValueBound) -> bool:
    """Whether it is of an operand's own values, and none of its ends is symbolic."""
    return bound.prepare is None and not any(isinstance(end, SymInt) for end in (bound.lowest, bound.highest))


def _values(arguments: Mapping[str, Any], values: Mapping[Node, Any]) -> Mapping[str, Any]:
    return map_arg(dict(arguments), values.__getitem__)  # type: ignore[no-any-return]


def _example(operand: Node) -> Tensor | SymInt:
    """An operand's fake value as an object of its own: several nodes may have one."""
    value = operand.meta["val"]
    return value.detach() if isinstance(value, Tensor) else value  # type: ignore[no-any-return]


def _place(node: Node) -> str:
    """The op and the user's line of a call."""
    frame = user_frame(node)
    return f"aten.{node.target.__name__}{f' at {frame}' if frame else ''}"  # type: ignore[union-attr]


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if are_values_checked(graph, context):
        check_values(graph.module.graph)
    return graph


PASS = Pass(
    "value_checks",
    _run,
    "on the CPU, calls whose values eager may refuse (indices, targets, divisors) have an assertion in front",
)
