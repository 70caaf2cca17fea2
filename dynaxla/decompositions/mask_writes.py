"""Writes by a mask, `x[mask] = values`, and their gradients.

A value for each place that the mask chooses is written by `masked_scatter`, in their order; the same values at all places by
`where`. torch's derivative reads `grad[mask]`, whose size depends on the data, so that no graph can contain it. Here the
gradient uses the number of elements of the values, which is known, and the mask that maps them to positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.python_kernels import AUTOGRAD, make_autograd_kernel, replace_python_kernels

aten = torch.ops.aten
Indices = Sequence[Tensor | None]
_MASKS = (torch.bool, torch.uint8)


class _MaskWrite(torch.autograd.Function):
    """`aten.index_put(x, indices, values, accumulate)` with a mask as its only index."""

    @staticmethod
    def forward(x: Tensor, values: Tensor, indices: Indices, accumulate: bool) -> Tensor:
        return aten.index_put(x, indices, values, accumulate)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Indices, bool], output: Tensor) -> None:
        _, values, ctx.indices, ctx.accumulate = inputs
        ctx.values = values.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradients of x and the values; the elements of x that the mask overwrites have the gradient zero."""
        place, mask = _mask(ctx.indices)
        behind = grad.ndim - place - mask.ndim
        kept = grad if ctx.accumulate else torch.where(mask.reshape(*mask.shape, *[1] * behind), 0, grad)
        return kept, _read(grad, mask, place, ctx.values), None, None


def _read(grad: Tensor, mask: Tensor, place: int, size: torch.Size) -> Tensor:
    """Returns `grad[..., mask, ...]` summed to `size`; the mask's dims start at dim `place`."""
    first = grad.movedim(tuple(range(place, place + mask.ndim)), tuple(range(mask.ndim)))
    rest = first.shape[mask.ndim :]  # the dims before and after the mask's
    chosen = mask.reshape(*mask.shape, *[1] * len(rest))
    axis = _counting_dim(size, len(rest) - place)
    if axis < 0 or size[axis] == 1:
        read = torch.where(chosen, first, 0).sum(tuple(range(mask.ndim))).unsqueeze(0)
    else:
        read = aten.masked_scatter_backward(first, chosen.expand(first.shape), [size[axis], *rest])
    return read.movedim(0, place).sum_to_size(size)


def write_by_mask(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Any:
    """Decomposes `index_put` by a mask alone: a value for each place that it chooses, or the same values at all of them."""
    given = [index.dtype in _MASKS for index in indices if index is not None]
    if (
        given != [True]
        or values.dtype is not x.dtype
        or all(isinstance(size, int) and size == 1 for size in values.shape)
    ):
        return NotImplemented
    place, mask = _mask(indices)
    front = tuple(range(mask.ndim))
    first = x.movedim(tuple(range(place, place + mask.ndim)), front)
    rest = first.shape[mask.ndim :]
    axis = _counting_dim(values.shape, len(rest) - place)
    if axis > place or mask.shape != first.shape[: mask.ndim]:
        return NotImplemented  # which the op refuses
    count = values.shape[axis] if axis >= 0 else 1
    rows = values.expand(*rest[:place], count, *rest[place:]).movedim(place, 0)
    chosen = mask.reshape(*mask.shape, *[1] * len(rest))
    if isinstance(count, int) and count == 1:
        written = rows.reshape(*[1] * mask.ndim, *rest)
    else:
        written = torch.masked_scatter(first, chosen.expand(first.shape), rows)
    if accumulate:
        written = first + written
    written = torch.where(~chosen, first, written)  # in x's order of dims, as eager's; the one before is row-major
    return written.movedim(front, tuple(range(place, place + mask.ndim)))


def _counting_dim(size: torch.Size, behind: int) -> int:
    """The dim of values that counts true elements of a mask, with so many dims behind the mask's; negative: there is none."""
    return len(size) - behind - 1


def _mask(indices: Indices) -> tuple[int, Tensor]:
    return next((place, index.bool()) for place, index in enumerate(indices) if index is not None)


def _is_differentiable_mask(indices: Indices, values: Tensor) -> bool:
    """Whether the only index is a mask, and the written values require a gradient."""
    given = [index.dtype in _MASKS for index in indices if index is not None]
    return given == [True] and torch.is_grad_enabled() and values.requires_grad


def _index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    if _is_differentiable_mask(indices, values):
        return _MaskWrite.apply(x, values, indices, accumulate)  # type: ignore[no-any-return]
    return make_autograd_kernel(aten.index_put.default)(x, indices, values, accumulate)  # type: ignore[no-any-return]


def _index_put_(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    if _is_differentiable_mask(indices, values):
        return x.copy_(_MaskWrite.apply(x, values, indices, accumulate))
    return make_autograd_kernel(aten.index_put_.default)(x, indices, values, accumulate)  # type: ignore[no-any-return]


def replace_mask_gradients() -> AbstractContextManager[None]:
    """Context in which gradients of writes by a mask have static sizes."""
    return replace_python_kernels(
        {aten.index_put.default: {AUTOGRAD: _index_put}, aten.index_put_.default: {AUTOGRAD: _index_put_}}
    )
