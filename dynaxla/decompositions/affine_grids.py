"""Affine grids of any sizes, and their gradient.

torch's decomposition of the grid makes a constant tensor for a dim of one place, which AOTAutograd refuses as a write; its
gradient is a kernel in C++ that takes plain sizes alone and makes the same constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch
from torch import Tensor
from torch.types import IntLikeType

from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, replace_python_kernels

aten = torch.ops.aten

Size = Sequence[IntLikeType]


def _affine_grid(theta: Tensor, size: Size, align_corners: bool) -> Tensor:
    """The grid [n, ..., dims] of matrices [n, dims, dims + 1] for images of a size [n, channels, ...]: the product of each with
    the places of the identity's grid, x first, and a one."""
    batch, _, *spatial = size
    mapped = _places(spatial, align_corners, theta)
    grid = (mapped.unsqueeze(-1) * theta.mT.unsqueeze(1)).sum(-2)
    return grid.view(batch, *spatial, len(spatial))


def _affine_grid_gradient(grad: Tensor, size: Size, align_corners: bool) -> Tensor:
    """The gradient [n, dims, dims + 1] of the matrices, of the grid's [n, ..., dims], transposed in memory as eager's is."""
    places = _places(size[2:], align_corners, grad).mT.expand(grad.shape[0], -1, -1)
    return torch.bmm(places, grad.flatten(1, -2)).mT


def _places(spatial: Size, align_corners: bool, like: Tensor) -> Tensor:
    """[points, dims + 1]"""
    axes = [_axis(steps, align_corners, like) for steps in spatial]
    meshed = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([*reversed(meshed), torch.ones_like(meshed[0])], -1).flatten(0, -2)


def _axis(steps: IntLikeType, align_corners: bool, like: Tensor) -> Tensor:
    """The places of a dim, from -1 to 1: the centers of its first and last element, or their outer ends."""
    if steps <= 1:
        return like.new_zeros(steps)
    end = 1 if align_corners else (steps - 1) / steps
    return torch.linspace(-end, end, steps, dtype=like.dtype, device=like.device)  # type: ignore[arg-type]


AFFINE_GRID_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor]] = MappingProxyType(
    {aten.affine_grid_generator.default: _affine_grid}
)


def derive_affine_grids() -> AbstractContextManager[None]:
    """Context in which the gradient is made of other ops. torch's kernels return at the end."""
    op = aten.affine_grid_generator_backward.default
    return replace_python_kernels({op: dict.fromkeys((COMPOSITE, AUTOGRAD), _affine_grid_gradient)})
