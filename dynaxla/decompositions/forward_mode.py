"""Ops that torch's forward-mode differentiation calls, made of ops of the op table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from dynaxla.torch_api.decompositions import Decomposition
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten


def _new_tangent(tangent: Tensor, primal: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Zeros for the tangent of a result that is written in parts: with the sizes and strides of the result, below vmap's dims.

    Args:
        tangent: has the dtype and, in front, the dims of vmap.
        primal: the result.
    """
    if self_num_batch_dims == 0:
        return torch.zeros_like(primal, dtype=tangent.dtype)
    return tangent.new_zeros([*tangent.shape[:self_num_batch_dims], *primal.shape])


def _glu(glu: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """The tangent of `glu = a * sigmoid(b)`, of which a and b are the halves of x along dim."""
    gate = x.chunk(2, dim)[1].sigmoid()
    da, db = dx.chunk(2, dim)
    return da * gate + db * (glu - gate * glu)


def _glu_backward(grad_x: Tensor, grad: Tensor, x: Tensor, dgrad: Tensor, dx: Tensor, dim: int) -> Tensor:
    """The tangent of glu's gradient: of `grad * gate` and `grad * a * slope`, of which slope is that of the sigmoid."""
    del grad_x
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    gate = b.sigmoid()
    slope = gate * (1 - gate)
    of_a = dgrad * gate + grad * slope * db
    of_b = dgrad * a * slope + grad * (da * slope + a * slope * (1 - 2 * gate) * db)
    return torch.cat([of_a, of_b], dim)


FORWARD_MODE_DECOMPOSITIONS: Mapping[OpOverload, Decomposition] = MappingProxyType(
    {
        aten._new_zeros_with_same_feature_meta.default: _new_tangent,
        aten.glu_jvp.default: _glu,
        aten.glu_backward_jvp.default: _glu_backward,
    }
)
