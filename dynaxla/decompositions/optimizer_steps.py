"""Ops of optimizers: sums scaled by a Python number that varies, as a step by its learning rate, and ops on lists of tensors.

Dynamo makes such a number an input from its second value on. AOTAutograd then turns arithmetic on it into arithmetic on
tensors, but only if it is a positional argument: for `add(x, y, alpha=number)` it gives up, and Dynamo captures the
graph again for every value. An op on lists is the same op on every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType, NotImplementedType

import torch
from torch import Tensor
from torch.types import FloatLikeType, Number

from dynaxla.torch_api.decompositions import get_computation_dtype
from dynaxla.torch_api.overloads import OpOverload, base_name, changes_arguments, overloads_named

aten = torch.ops.aten

Sum = Tensor | NotImplementedType
LEFT_TO_TORCH: Sum = NotImplemented


def _add(x: Tensor, y: Tensor, *, alpha: FloatLikeType = 1) -> Sum:
    return _scaled_sum(alpha, lambda x, y: x + y * alpha, x, y)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: FloatLikeType = 1) -> Sum:
    return _scaled_sum(value, lambda x, y, z: x + y * z * value, x, y, z)


def _addcdiv(x: Tensor, y: Tensor, z: Tensor, *, value: FloatLikeType = 1) -> Sum:
    return _scaled_sum(value, lambda x, y, z: x + y / z * value, x, y, z)


def _scaled_sum(scale: FloatLikeType, compute: Callable[..., Tensor], *operands: Tensor) -> Sum:
    """Computes the sum if the scale is symbolic; as in eager, 16-bit floats are rounded once."""
    if not isinstance(scale, torch.SymFloat):
        return LEFT_TO_TORCH
    dtype = torch.result_type(operands[0], operands[1])
    wide = get_computation_dtype(dtype)
    return compute(*(operand.to(wide) for operand in operands)).to(dtype)


SCALED_SUM_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Sum]] = MappingProxyType(
    {aten.add.Tensor: _add, aten.addcmul.default: _addcmul, aten.addcdiv.default: _addcdiv}
)

_PREFIX = "_foreach_"


def _foreach_addcmul(self: Tensor, one: Tensor, other: Tensor, value: Number = 1) -> Tensor:
    return torch.addcmul(self, one, other, value=value)


def _foreach_addcdiv(self: Tensor, one: Tensor, other: Tensor, value: Number = 1) -> Tensor:
    return torch.addcdiv(self, one, other, value=value)


def _foreach_norm(self: Tensor, order: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(self, order, dtype=dtype)
    return norm


# Ops for which torch has no function of the same name and arguments.
_SINGLE_OPS: Mapping[str, Callable[..., Tensor]] = {
    "addcdiv": _foreach_addcdiv,
    "addcmul": _foreach_addcmul,
    "copy": aten.copy.default,
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": _foreach_norm,
    "zero": torch.zeros_like,
}


@cache
def foreach_decompositions() -> Mapping[OpOverload, Callable[..., list[Tensor]]]:
    """Returns a decomposition of every functional `_foreach_` op, which changes none of its arguments."""
    found = {}
    for op in overloads_named(f"aten::{_PREFIX}"):
        name = base_name(op).removeprefix(_PREFIX)
        single_op = _SINGLE_OPS.get(name) or getattr(torch, name, None)
        if single_op is not None and not changes_arguments(op):
            found[op] = _apply_to_each(single_op)
    return found


def _apply_to_each(single_op: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Makes an op on lists: one call for each index. An argument that is no list is passed to every call."""

    def run(*args: object, **kwargs: object) -> list[Tensor]:
        count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
        columns = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in args]
        return [single_op(*(column[i] for column in columns), **kwargs) for i in range(count)]

    return run
