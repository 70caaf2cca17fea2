"""Barriers in front of ops that XLA would compute together with what gives their operands, to other numbers.

XLA's algebraic simplifier takes real numbers for exact: `(x + c) - c` becomes `x`, `x * c * d` becomes `x * (c * d)`, which may
overflow, `a / b / c` becomes `a / (b * c)`, `sqrt(x * x)` becomes `abs(x)`, `log(exp(x))` becomes `x`. It also takes NaN for
at least 0 where it comes of `abs` or a square, and `x + 0` for `x`, where -0 becomes 0. It does not look through a barrier,
which is gone before XLA fuses ops: the program is the same but for those rewrites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
_COMPARISONS = (aten.ge.Scalar, aten.ge.Tensor, aten.le.Scalar, aten.le.Tensor)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLINGS: Mapping[Any, int] = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
"""Where among its arguments an op has the number that it fills a tensor with."""

_WIDE = (torch.float32, torch.float64)
"""Of narrower dtypes each op is computed in float32 and rounded, which XLA does not look through either."""


def keep_roundings(graph: Graph) -> None:
    """Puts barriers between the ops of a graph that XLA would compute as one of other numbers."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_wide(node):
            for place, operand in enumerate(node.args):
                if isinstance(operand, Node) and operand.op == "call_function" and _is_joined(node, operand):
                    node.update_arg(place, call_before(graph, node, BARRIER, (operand,)))
            if node.target in _SUMS[:2] and not node.kwargs and _adds_zero(node):
                _hide_zero(graph, node)


def _is_joined(node: Node, operand: Node) -> bool:
    """Whether XLA would compute an op and what gives its operand as one op of other numbers."""
    op, inner = node.target, operand.target
    has_numbers = _number(node) is not None and _number(operand) is not None
    if op in _SUMS:
        return inner in _SUMS and has_numbers
    if op in _PRODUCTS and inner in _PRODUCTS:
        return has_numbers or (op in _QUOTIENTS and inner in _QUOTIENTS)
    if op in _PRODUCTS:
        return all(isinstance(each, Node) and each.target in _EXPONENTIALS for each in node.args)
    if op in _ROOTS:
        return inner in (*_POWERS, *_EXPONENTIALS) or (inner in _PRODUCTS and operand.args[0] is operand.args[-1])
    if op in _LOGARITHMS:
        return inner in (*_EXPONENTIALS, *_POWERS)
    return op in _COMPARISONS and _number(node) == 0


def _number(node: Node) -> float | None:
    """The number among an op's operands, by itself or as a tensor filled with it; None if there is none, or one that varies."""
    return next((found for found in map(_value, node.args) if found is not None), None)


def _value(operand: Any) -> float | None:
    if isinstance(operand, Node):
        place = _FILLINGS.get(operand.target)
        operand = 0 if operand.target in _ZEROS else None if place is None else operand.args[place]
    return operand if isinstance(operand, (int, float)) else None


def _adds_zero(node: Node) -> bool:
    """Whether a sum makes 0 of -0, and else gives its operand."""
    number = _number(node)
    return number is not None and number == 0 and math.copysign(1, number) > 0


def _hide_zero(graph: Graph, node: Node) -> None:
    place = next(place for place, operand in enumerate(node.args) if _value(operand) is not None)
    zero, other = node.args[place], node.args[1 - place]
    if not isinstance(zero, Node):
        value = other.meta["val"]  # type: ignore[union-attr]
        zero = call_before(graph, node, aten.full.default, ([], 0.0), {"dtype": value.dtype, "device": value.device})
    made = call_before(graph, node, aten.add.Tensor, (other, call_before(graph, node, BARRIER, (zero,))))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_wide(node: Node) -> bool:
    """Whether all tensors that an op takes are of a dtype that it is computed in."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(tensor.dtype in _WIDE for tensor in tensors)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    keep_roundings(graph.module.graph)
    return graph


PASS = Pass(
    "rounding_barriers",
    _run,
    "ops that XLA would compute as one of other roundings, overflows, zeros or NaN have a barrier between them",
)
