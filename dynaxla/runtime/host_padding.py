"""Converts a call's tensors to the layout of program arguments: row-major, padded at the end of each dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynaxla.torch_api.storages import is_zero_tensor
from dynaxla.types import row_major_strides


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The shape that a tensor is padded to, row-major.

    Attributes:
        strides: in elements.
        elements: the number of elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> PaddedShape:
        return cls(tuple(sizes), row_major_strides(sizes), math.prod(sizes))


def pad(tensor: torch.Tensor, padded: PaddedShape) -> torch.Tensor:
    """Pads a tensor at the end of each dim. The padding is undefined: pad rules assume nothing about it."""
    if tensor.shape == padded.sizes:
        return tensor
    if is_padded_view(tensor, padded):
        # A cropped result, or a part of a larger batch: the elements around it serve as padding.
        return tensor.data.as_strided(padded.sizes, padded.strides)
    made = torch.empty(padded.sizes, dtype=tensor.dtype, device=tensor.device)
    made.as_strided(tensor.shape, padded.strides).copy_(tensor)
    return made


def is_padded_view(tensor: torch.Tensor, padded: PaddedShape) -> bool:
    """Whether the tensor is a view of the front of such a padded tensor and its storage contains all of that tensor."""
    for size, mine, stride in zip(tensor.shape, tensor.stride(), padded.strides, strict=True):
        if mine != stride and size > 1:
            return False
    elements_from_here = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return elements_from_here >= padded.elements


def to_row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as row-major memory; a copy only if its strides differ, a lazy conj or neg bit is set, or it has no
    memory."""
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor
