"""Memory of tensors: addresses, copy-on-write marks, versions, DLPack.

Several stand in every call, so that they are torch's own functions under another name, with no call of Python's around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

data_address: Callable[[torch.Tensor], int] = torch.Tensor.const_data_ptr  # type: ignore[attr-defined]
"""Where a tensor's first element lies. Unlike `data_ptr` a read: it leaves a copy-on-write mark alone.

In torch since 2.13, under this public name. Before there was `torch._C._data_address`, which says where the storage begins: a
tensor that is given another place of the same storage has the same one.
"""

is_marked: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
"""Whether a tensor's storage is marked copy-on-write. torch clears the mark at the first access that may write, whatever the
alias; where the storage has one owner it neither copies nor moves anything then."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Autograd's count of writes into a tensor, which misses those through `.data`. Inference tensors have none: RuntimeError."""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Names a storage for as long as it lives: that of all tensors that share memory is the same."""

to_capsule: Callable[[torch.Tensor], Any] = to_dlpack
"""A tensor's memory as a DLPack capsule. An access that may write: it clears a copy-on-write mark."""

from_capsule: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
"""The tensor of a DLPack capsule. `torch.from_dlpack` adds a protocol negotiation that costs 4 us."""


def mark(tensor: torch.Tensor) -> bool:
    """Marks a tensor's storage copy-on-write, with one owner; gives whether it could be.

    Relies on `torch._lazy_clone`, which raises RuntimeError for memory that has an owner other than torch's allocator.
    """
    try:
        clone = torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return False
    del clone  # leaves the mark with one owner
    return is_marked(tensor)
