"""Barriers in front of what XLA would compute together with the op that takes it, to other numbers.

XLA's algebraic simplifier takes real numbers for exact: `(x + c) - c` becomes `x`, `x * c * d` becomes `x * (c * d)`, which may
overflow, `a / b / c` becomes `a / (b * c)`, `sqrt(x * x)` becomes `abs(x)`, `log(exp(x))` becomes `x`. It also takes NaN for
at least 0 where it comes of `abs` or a square, and `x + 0` for `x`, where -0 becomes 0. It does not look through a barrier.

Where numbers are what it computes with, these are hidden, each as a tensor of no dims: what reads it is fused as before. A
barrier on values is gone before XLA fuses on a CPU; on a TPU it keeps two fusions apart.
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
from dynaxla.torch_api.symbols import expression

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, *_QUOTIENTS)
_POWERS = (aten.pow.Tensor_Scalar, aten.square.default)
_ROOTS = (aten.sqrt.default, aten.rsqrt.default, *_POWERS)
_LOGARITHMS = (aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default)
_EXPONENTIALS = (aten.exp.default, aten.exp2.default, aten.expm1.default)
_OF_TENSORS: Mapping[Any, Any] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), aten.add.Tensor),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar), aten.sub.Tensor),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), aten.mul.Tensor),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), aten.div.Tensor),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), aten.ge.Tensor),
    aten.le.Tensor: aten.le.Tensor,
}
"""The overload of two tensors."""

_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLINGS: Mapping[Any, int] = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
"""Where among its arguments an op has the number that it fills a tensor with."""

_WIDE = (torch.float32, torch.float64)
"""Of narrower dtypes each op is computed in float32 and rounded, which XLA does not look through either."""


def keep_roundings(graph: Graph) -> None:
    """Puts barriers between the ops of a graph that XLA would compute as one of other numbers."""
    hidden = dict[Node, None]()
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_wide(node):
            if _depends_on_zero(node):
                hidden[node] = None
            for place, operand in enumerate(node.args):
                if isinstance(operand, Node) and operand.op == "call_function":
                    if (
                        _has_hidable_number(node)
                        and _has_hidable_number(operand)
                        and _are_sums_or_products(node, operand)
                    ):
                        hidden |= {operand: None, node: None}
                    elif _is_joined(node, operand):
                        node.update_arg(place, call_before(graph, node, BARRIER, (operand,)))
    for node in hidden:
        _hide_number(graph, node)


def _are_sums_or_products(node: Node, operand: Node) -> bool:
    """Whether XLA would add the numbers of two ops, or multiply them; a quotient of a quotient it rewrites without numbers."""
    op, inner = node.target, operand.target
    are_products = op in _PRODUCTS and inner in _PRODUCTS and not (op in _QUOTIENTS and inner in _QUOTIENTS)
    return are_products or (op in _SUMS and inner in _SUMS)


def _is_joined(node: Node, operand: Node) -> bool:
    """Whether XLA would compute an op and what gives its operand as one op of other numbers."""
    op, inner = node.target, operand.target
    if _are_sums_or_products(node, operand):
        return _number(node) is not None and _number(operand) is not None
    if op in _PRODUCTS and inner in _PRODUCTS:
        return True
    if op in _PRODUCTS:
        return all(isinstance(each, Node) and each.target in _EXPONENTIALS for each in node.args)
    if op in _ROOTS:
        return inner in (*_POWERS, *_EXPONENTIALS) or (inner in _PRODUCTS and operand.args[0] is operand.args[-1])
    return op in _LOGARITHMS and inner in (*_EXPONENTIALS, *_POWERS)


def _depends_on_zero(node: Node) -> bool:
    """Whether an op makes 0 of -0, and else gives its operand, or asks whether that is at least 0."""
    number = _number(node)
    if number is None or number != 0 or not _has_hidable_number(node):
        return False
    is_first = _value(node.args[0]) is not None
    if node.target in (aten.ge.Tensor, aten.ge.Scalar, aten.le.Tensor):
        return is_first == (node.target is aten.le.Tensor)
    return node.target in _SUMS[:2] and math.copysign(1, number) > 0


def _number(node: Node) -> float | None:
    """The number among an op's operands, by itself or as a tensor filled with it; None if there is none, or one that varies."""
    return next((found for found in map(_value, node.args) if found is not None), None)


def _value(operand: Any) -> float | None:
    if isinstance(operand, Node):
        place = _FILLINGS.get(operand.target)
        operand = 0 if operand.target in _ZEROS else None if place is None else operand.args[place]
    return operand if isinstance(operand, (int, float)) else None


def _has_hidable_number(node: Node) -> bool:
    """Whether an op takes two operands alone, a number and a tensor whose dtype holds it."""
    if node.target not in _OF_TENSORS or len(node.args) != 2 or node.kwargs:
        return False
    others = [operand for operand in node.args if _value(operand) is None]
    is_tensor = len(others) == 1 and isinstance(others[0], Node) and isinstance(others[0].meta["val"], torch.Tensor)
    return is_tensor and _is_wide(node)


def _hide_number(graph: Graph, node: Node) -> None:
    """Puts an op of two tensors in the place of one of a tensor and a number, of whose value XLA knows nothing."""
    place = next(place for place, operand in enumerate(node.args) if _value(operand) is not None)
    filled, other = node.args[place], node.args[1 - place]
    value, number = other.meta["val"], _value(filled)  # type: ignore[union-attr]
    if not isinstance(filled, Node) or _is_like(filled.meta["val"], value, node.meta["val"]):
        rounded = torch.tensor(number, dtype=torch.float64, device="cpu").to(value.dtype)  # infinite where it overflows
        settings = {"dtype": value.dtype, "device": value.device}
        filled = call_before(graph, node, aten.full.default, ([], rounded.item()), settings)
    operands = [other, other]
    operands[place] = call_before(graph, node, BARRIER, (filled,))
    if node.target in (aten.rsub.Tensor, aten.rsub.Scalar):
        operands.reverse()
    made = call_before(graph, node, _OF_TENSORS[node.target], tuple(operands))
    made.meta["val"] = node.meta["val"]  # a filled tensor's strides count, a number has none
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_like(filled: torch.Tensor, value: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a number instead of a filled tensor gives the same size and dtype."""
    sizes = [[expression(size) for size in tensor.shape] for tensor in (value, made)]
    return filled.dtype is value.dtype and sizes[0] == sizes[1]


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
