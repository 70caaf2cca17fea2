"""Barriers in front of ops that XLA would compute together with what gives their operands, to other numbers.

XLA's algebraic simplifier takes real numbers for exact: `(x + c) - c` becomes `x`, `x * c * d` becomes `x * (c * d)`, which may
overflow, `a / b / c` becomes `a / (b * c)`, `sqrt(x * x)` becomes `abs(x)`, `log(exp(x))` becomes `x`. It also takes NaN for
at least 0 where it comes of `abs` or a square, and `x + 0` for `x`, where -0 becomes 0. It does not look through a barrier,
which is gone before XLA fuses ops: the program is the same but for those rewrites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.barrier import BARRIER
from dynaxla.fx.edit import call_before
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, *_QUOTIENTS)
_POWERS = (aten.pow.Tensor_Scalar, aten.square.default)
_ROOTS = (aten.sqrt.default, aten.rsqrt.default, *_POWERS)
_LOGARITHMS = (aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default)
_EXPONENTIALS = (aten.exp.default, aten.exp2.default, aten.expm1.default)
_AT_LEAST = (aten.ge.Scalar,)
_WIDE = (torch.float32, torch.float64)
"""Of narrower dtypes each op is computed in float32 and rounded, which XLA does not look through either."""


def keep_roundings(graph: Graph) -> None:
    """Puts barriers between the ops of a graph that XLA would compute as one of other numbers."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_wide(node):
            continue
        for place, operand in _hidden(node):
            barrier = call_before(graph, node, BARRIER, (operand,))
            node.update_arg(place, barrier)
        if node.target in _SUMS[:2] and _adds_zero(node):
            _hide_zero(graph, node)


def _hidden(node: Node) -> Iterator[tuple[int, Node]]:
    """The operands that XLA must not look through, with their places."""
    for place, operand in enumerate(node.args):
        if isinstance(operand, Node) and operand.op == "call_function" and _is_joined(node, operand):
            yield place, operand


def _is_joined(node: Node, operand: Node) -> bool:
    """Whether XLA would compute an op and what gives its operand as one op of other numbers."""
    op, inner = node.target, operand.target
    has_numbers = _number(node) is not None and _number(operand) is not None
    if op in _SUMS:
        return inner in _SUMS and has_numbers
    if op in _PRODUCTS and inner in _PRODUCTS:
        return has_numbers or (op in _QUOTIENTS and inner in _QUOTIENTS)
    if op in _PRODUCTS:
        return (
            inner in _EXPONENTIALS and op not in _QUOTIENTS and all(_is_call(each, _EXPONENTIALS) for each in node.args)
        )
    if op in _ROOTS:
        return inner in (*_POWERS, *_EXPONENTIALS) or (inner in _PRODUCTS and operand.args[0] is operand.args[-1])
    if op in _LOGARITHMS:
        return inner in (*_EXPONENTIALS, *_POWERS)
    return op in _AT_LEAST and _number(node) == 0


def _is_call(value: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(value, Node) and value.target in targets


def _number(node: Node) -> float | None:
    """The number that an op adds or multiplies by; None if it has none, or one that varies."""
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    return numbers[0] if numbers else None


def _adds_zero(node: Node) -> bool:
    """Whether a sum makes 0 of -0, and else gives its operand."""
    number = _number(node)
    return number is not None and number == 0 and math.copysign(1, number) > 0


def _is_wide(node: Node) -> bool:
    """Whether all tensors that an op takes are of a dtype that it is computed in."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(tensor.dtype in _WIDE for tensor in tensors)


def _hide_zero(graph: Graph, node: Node) -> None:
    operand: Any = node.args[0]
    value = operand.meta["val"]
    zero = call_before(graph, node, aten.full.default, ([], 0.0), {"dtype": value.dtype, "device": value.device})
    hidden = call_before(graph, node, BARRIER, (zero,))
    made = call_before(graph, node, aten.add.Tensor, (operand, hidden))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    keep_roundings(graph.module.graph)
    return graph


PASS = Pass(
    "rounding_barriers",
    _run,
    "ops that XLA would compute as one of other roundings, overflows, zeros or NaN have a barrier between them",
)
