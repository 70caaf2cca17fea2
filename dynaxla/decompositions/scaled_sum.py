"""Sums scaled by a Python number that varies, such as an optimizer's step scaled by its learning rate.

Dynamo makes such a number an input from its second value on. AOTAutograd then turns arithmetic on it into arithmetic on
tensors, but only if it is a positional argument: for `add(x, y, alpha=number)` it gives up, and Dynamo captures the
graph again for every value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, NotImplementedType

import torch
from torch import Tensor
from torch.types import FloatLikeType

from dynaxla.torch_api.decompositions import get_computation_dtype
from dynaxla.torch_api.overloads import OpOverload

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
