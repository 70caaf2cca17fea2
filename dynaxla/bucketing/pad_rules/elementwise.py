"""Rules of elementwise ops: padding stays padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import align_operands
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    Number,
    PaddedValue,
    Results,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_varying
from dynaxla.torch_api.overloads import OpOverload, parameters

aten = torch.ops.aten

# Overloads that take a number, and the overload with a 0-d tensor for it: a symbolic size is a number that varies.
_WITH_TENSOR: Mapping[OpOverload, OpOverload] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor: aten.remainder.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.bitwise_and.Scalar: aten.bitwise_and.Tensor,
    aten.bitwise_or.Scalar: aten.bitwise_or.Tensor,
    aten.bitwise_xor.Scalar: aten.bitwise_xor.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar: aten.bitwise_left_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar: aten.bitwise_right_shift.Tensor,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor,
    aten.fill.Scalar: aten.fill.Tensor,
    aten.floor_divide.Scalar: aten.floor_divide.default,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.where.Scalar: aten.where.self,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
    aten.xlogy.Scalar_Other: aten.xlogy.Tensor,
    aten.xlogy.Scalar_Self: aten.xlogy.Tensor,
}
_SIZES_ALLOWED = frozenset(_WITH_TENSOR.values())


@takes(TRUE_SIZE)
def elementwise(call: RuleContext) -> Results:
    """Elementwise ops, `where`, casts and copies, with equal or broadcast operands: padding stays padding."""
    call = align_operands(call)
    dims = broadcast([value.dims for value in call.tensors])
    node = _emit_with_sizes(call) if _varying(call) else call.same()
    if not isinstance(node.meta["val"], torch.Tensor):
        return call.results(node, [dims] * len(node.meta["val"]))
    return call.result(node, dims, _compute_fill(call, dims))


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The dims of the broadcast result of values with these dims.

    Raises:
        Unpaddable: two of them have their real elements at different positions.
    """
    rank = max(map(len, shapes), default=0)
    result: list[Dim] = []
    for position in range(-rank, 0):
        found = [dims[position] for dims in shapes if len(dims) >= -position]
        wide = [dim for dim in found if padded_size(dim) != 1]
        if not all(have_same_layout(dim, wide[0]) for dim in wide):
            raise Unpaddable("operands hold their real elements in different places")
        result.append(wide[0] if wide else (Factor(1, 1),))
    return tuple(result)


def _varying(call: RuleContext) -> bool:
    return any(map(is_varying, call.given.values()))


def _emit_with_sizes(call: RuleContext) -> Node:
    """Emits the op with a symbolic size as a 0-d tensor, and casts the result to the dtype that a number would have given."""
    target, wanted = _WITH_TENSOR.get(call.op, call.op), call.node.meta["val"].dtype
    if target not in _SIZES_ALLOWED:
        raise Unpaddable(f"{call.op} takes a size as a number")
    names = [name for name in call.given if name not in ("alpha", "rounding_mode")]
    operands = [_make_operand(call, call[name]) for name in names]
    if call.get("alpha", 1) != 1:
        # In float32: eager rounds 16-bit floats once, after the sum.
        scaled = names.index("self" if "rsub" in call.op_name else "other")
        operands = [_widened(call, operand) for operand in operands]
        operands[scaled] = call.build.emit(aten.mul.Tensor, operands[scaled], call.build.scalar(call["alpha"]))
    kwargs = {"rounding_mode": call["rounding_mode"]} if "rounding_mode" in call.given else {}
    node = call.build.emit(target, *operands, **kwargs)
    return node if node.meta["val"].dtype is wanted else call.build.emit(aten._to_copy.default, node, dtype=wanted)


def _make_operand(call: RuleContext, value: PaddedValue | Size | None) -> Node | None:
    """The node of an operand: of a padded value its own, of a size (or a number beside one) a 0-d tensor."""
    if value is None or isinstance(value, PaddedValue):
        return None if value is None else value.node
    return call.build.scalar(value)


def _widened(call: RuleContext, operand: Node | None) -> Node | None:
    if operand is not None and operand.meta["val"].dtype in (torch.float16, torch.bfloat16):
        return call.build.emit(aten._to_copy.default, operand, dtype=torch.float32)
    return operand


def _compute_fill(call: RuleContext, dims: tuple[Dim, ...]) -> Number | None:
    """The op's result on the operands' fill values; None if one of them is unknown."""
    if all(map(is_full, dims)) or _varying(call):
        return None
    if call.op.namespace != "aten":
        return None  # another package's kernel may take no 0-d tensors
    values = call.tensors
    if any(value.fill is None or value.dims != dims for value in values):
        return None
    given = {
        name: torch.tensor(value.fill, dtype=value.meta.dtype) if isinstance(value, PaddedValue) else value
        for name, value in call.given.items()
        if name != "device"
    }
    schema = parameters(call.op)
    args = [given[a.name] for a in schema if not a.kwarg_only]
    kwargs = {a.name: given[a.name] for a in schema if a.kwarg_only and given.get(a.name) is not None}
    try:
        made = call.op(*args, **kwargs)
    except RuntimeError:  # a division of integers by zero: eager raises, a program computes some number
        return None
    # The integer to which an infinity is converted depends on the machine.
    cast = all(value.meta.dtype.is_floating_point for value in values) and not made.dtype.is_floating_point
    return None if cast and made.dtype is not torch.bool else made.item()
