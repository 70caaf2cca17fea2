"""Permutations of dims: the one that makes a tensor row-major, and inverses."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def find_row_major_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation that makes a dense tensor row-major; None if it is row-major, or not dense."""
    if value.is_contiguous() or value.numel() == 0:
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], d)))
    return order if value.permute(order).is_contiguous() else None


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor is a permutation of a row-major one, or empty."""
    return value.numel() == 0 or value.is_contiguous() or find_row_major_order(value) is not None


def invert_permutation(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
