"""Permutations of dims: the one that makes a tensor row-major, and inverses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from dynaxla.types import row_major_strides

Order: TypeAlias = tuple[int, ...]
"""A permutation of dims."""


def find_row_major_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation that makes a dense tensor row-major; None if it is row-major, or not dense."""
    if value.is_contiguous() or value.numel() == 0:
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], d)))
    return order if value.permute(order).is_contiguous() else None


def find_result_order(value: torch.Tensor) -> tuple[Order | None, bool]:
    """Returns the permutation that makes a tensor row-major, None as in `find_row_major_order`, and whether a row-major tensor
    that is permuted back has all of the tensor's strides, those of dims of one element, too.
    """
    strides, as_it_is = value.stride(), tuple(range(value.dim()))
    order = find_row_major_order(value)
    inner_ones = tuple(sorted(as_it_is, key=lambda d: (-strides[d], value.shape[d] == 1, d)))
    for each in (order or as_it_is, inner_ones):
        if tuple(strides[d] for d in each) == row_major_strides([value.shape[d] for d in each]):
            return (None if each == as_it_is else each), True
    return order, False


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor is a permutation of a row-major one, or empty."""
    return value.numel() == 0 or value.is_contiguous() or find_row_major_order(value) is not None


def invert_permutation(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
