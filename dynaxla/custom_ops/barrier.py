"""The operators that no compiler looks through."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dynaxla::barrier", mutates_args=())
def barrier(x: Tensor) -> Tensor:
    """A copy of a tensor, of which a compiler knows nothing but its size and dtype."""
    return x.clone()


@barrier.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


BARRIER = torch.ops.dynaxla.barrier.default


@torch.library.custom_op("dynaxla::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """A copy of a tensor, whose elements are computed once for all that read it."""
    return x.clone()


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


MATERIALIZE = torch.ops.dynaxla.materialize.default
