"""Margin losses with eager's arithmetic.

torch decomposes them before it consults any decomposition table, and not into what its kernels compute: the multilabel
loss also counts positions after the end of a row's labels, and exactly at the margin, where the kernels' gradients are
zero, those of the decompositions are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch
from torch import Tensor

from dynaxla.diagnostics import EagerRefusal
from dynaxla.ops.dtypes import FLOATS, WIDE_FLOATS
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.python_kernels import AUTOGRAD, replace_python_kernels

aten = torch.ops.aten
NONE, MEAN = 0, 1


def _multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Loss for x [n, classes] or [classes] and target, the class of each row: the amounts by which other classes exceed
    the target's value minus the margin, to the power p."""
    _check_dtypes(x, target, weight)
    rows, labels = torch.atleast_2d(x), torch.atleast_1d(target).unsqueeze(1)
    _check_sizes(x, target.dim() < 2 and target.numel() == rows.shape[0], target)
    above = margin - rows.gather(1, labels) + rows
    others = torch.arange(rows.shape[1], device=x.device) != labels
    above = torch.where(others & (above > 0), above, 0)
    above = above if p == 1 else above * above
    above = above if weight is None else above * weight[labels]
    return _apply_reduction(above.sum(1) / rows.shape[1], target, reduction)


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Loss for x [n, classes], [classes] or [] and target of the same shape, the labels of each row up to the first -1.
    The second result marks the classes that are labels."""
    _check_dtypes(x, target, None)
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    is_row = x.dim() < 2 and target.dim() < 2 and target.numel() == rows.shape[1]
    _check_sizes(x, is_row or target.shape == x.shape, target)
    classes = torch.arange(rows.shape[1], device=x.device)
    listed = (labels == -1).cumsum(1) == 0
    labels = torch.where(listed, labels, 0)
    is_label = ((classes == labels.unsqueeze(2)) & listed.unsqueeze(2)).any(1)
    above = 1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1)  # [n, label, class]
    counts = listed.unsqueeze(2) & ~is_label.unsqueeze(1) & (above > 0)
    losses = torch.where(counts, above, 0).sum((1, 2)) / rows.shape[1]
    return _apply_reduction(losses, x[..., 0] if x.dim() else x, reduction), is_label.to(x.dtype).reshape(target.shape)


def _check_dtypes(x: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """
    Raises:
        EagerRefusal: eager does not take x (its kernel for the CPU takes no 16-bit floats), the labels, or weights beside x.
    """
    if x.dtype not in (FLOATS if x.is_cuda else WIDE_FLOATS):
        raise EagerRefusal(f"a margin loss of {x.dtype}")
    if x.numel() and target.dtype is not torch.int64:
        raise EagerRefusal(f"labels of {target.dtype}")
    if x.numel() and weight is not None and weight.dtype is not x.dtype:
        raise EagerRefusal(f"weights of {weight.dtype} for {x.dtype}")


def _check_sizes(x: Tensor, has_target: bool, target: Tensor) -> None:
    """
    Raises:
        EagerRefusal: x has no classes or more dims than two, or a target of another size than eager takes.
    """
    if x.dim() > 2 or (x.dim() and x.shape[-1] == 0):
        raise EagerRefusal(f"a margin loss of sizes {list(x.shape)}")
    if not has_target:
        raise EagerRefusal(f"labels of sizes {list(target.shape)} for {list(x.shape)}")


def _apply_reduction(losses: Tensor, like: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return losses.reshape(like.shape)
    return losses.mean() if reduction == MEAN else losses.sum()


MARGIN_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., object]] = MappingProxyType(
    {
        aten.multi_margin_loss.default: _multi_margin_loss,
        aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    }
)


def replace_margin_losses() -> AbstractContextManager[None]:
    """Context in which these decompositions replace torch's, which are restored at the end."""
    return replace_python_kernels(
        {op: {AUTOGRAD: decomposition} for op, decomposition in MARGIN_DECOMPOSITIONS.items()}
    )
