"""A call's tensors as programs take them: row-major, and in the corner of larger ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynaxla.types import row_major_strides


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """A row-major shape that a tensor is padded to.

    Attributes:
        strides: in elements.
        elements: how many it has.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> PaddedShape:
        return cls(tuple(sizes), row_major_strides(sizes), math.prod(sizes))


def pad(tensor: torch.Tensor, padded: PaddedShape) -> torch.Tensor:
    """The tensor in the corner of a larger one, whose other elements may hold anything: pad rules count on nothing of them."""
    if tensor.shape == padded.sizes:
        return tensor
    if lies_in(tensor, padded):
        # The crop of a padded result, or a part of a larger batch: what lies around it serves as padding.
        return tensor.data.as_strided(padded.sizes, padded.strides)
    made = torch.empty(padded.sizes, dtype=tensor.dtype, device=tensor.device)
    made.as_strided(tensor.shape, padded.strides).copy_(tensor)
    return made


def lies_in(tensor: torch.Tensor, padded: PaddedShape) -> bool:
    """Whether the tensor is the corner of such a padded tensor, all of which its storage holds."""
    for size, mine, stride in zip(tensor.shape, tensor.stride(), padded.strides, strict=True):
        if mine != stride and size > 1:
            return False
    elements_from_here = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return elements_from_here >= padded.elements


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as row-major memory; a view of its own memory unless its strides changed or bits are lazy."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor
