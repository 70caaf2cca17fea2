"""Memory of tensors: addresses, copy-on-write marks, versions, DLPack.

Several of these run in every call, so they are torch's own functions under other names, without a Python call around
them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

data_address: Callable[[torch.Tensor], int] = torch.Tensor.const_data_ptr  # type: ignore[attr-defined]
"""Address of a tensor's first element. Unlike `data_ptr`, a read: it does not clear a copy-on-write mark.

Public in torch since 2.13. Earlier versions have `torch._C._data_address`, the address of the storage, which is the
same for a tensor with another offset.
"""

is_marked: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
"""Whether a tensor's storage is marked copy-on-write. torch clears the mark at the first access through any alias that
may write; if the storage has one owner, it copies and moves nothing."""

is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor stands for zeros and has no memory, as autograd makes them."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Autograd's count of writes to a tensor, without writes through `.data`. Inference tensors have none: RuntimeError."""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Identity of a storage during its lifetime: the same for all tensors that share memory."""

to_capsule: Callable[[torch.Tensor], Any] = to_dlpack
"""A tensor's memory as a DLPack capsule. An access that may write: it clears a copy-on-write mark."""

from_capsule: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
"""The tensor of a DLPack capsule. `torch.from_dlpack` adds a protocol negotiation that costs 4 us."""


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each of some tensors to another: `copy_` of each, without a Python call for each.

    No dispatch mode sees it: torch gives a mode the plain number in place of a tensor that stands for one, as autograd saves
    them, and then misses a tensor in the list. Relies on `torch.utils._python_dispatch._disable_current_modes`.
    """
    if not torch._C._len_torch_dispatch_stack():
        torch._foreach_copy_(targets, sources)
        return
    with _disable_current_modes():
        torch._foreach_copy_(targets, sources)


def count_owners(storage: torch.UntypedStorage) -> int:
    """How many hold a storage: tensors, exports such as numpy arrays, and the storage's Python object, which is the argument.

    A DLPack capsule of a tensor that requires no gradients holds the tensor itself, and is not counted. Relies on
    `torch._C._storage_Use_Count`.
    """
    owners: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return owners


def has_equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits: NaN equals itself, and -0 is not 0.

    No dispatch mode sees it, by `torch.utils._python_dispatch._disable_current_modes`.
    """
    with _disable_current_modes():
        return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move_memory(tensor: torch.Tensor) -> None:
    """Moves a dense tensor to new memory of torch's own. Its version stays, as nothing is written.

    Relies on what `Tensor.data` does when it is set: graphs that have saved the tensor see the new memory.
    """
    tensor.data = tensor.detach().clone()


def mark(tensor: torch.Tensor) -> bool:
    """Marks a tensor's storage copy-on-write, with one owner. Returns whether that was possible.

    Relies on `torch._lazy_clone`, which raises RuntimeError for memory not owned by torch's allocator.
    """
    try:
        clone = torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return False
    del clone  # leaves the mark with one owner
    return is_marked(tensor)


def borrow_memory(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor of the host's memory at an address, which it does not own, and which must outlast its reads.

    Relies on `torch._C._construct_storage_from_data_pointer`, whose storage frees nothing.
    """
    device, size = torch.device("cpu"), math.prod(sizes) * dtype.itemsize
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, sizes, strides)


def is_plain(value: object) -> bool:
    """Whether a value is a tensor of the host whose elements lie in its memory as its dtype and strides say: no subclass but
    a parameter, nothing sparse, lazily conjugated or negated, or wrapped by a transform.

    Relies on `torch._C._dispatch_keys`, which differ for all of these, and on `raw_repr` of the keys.
    """
    return type(value) in (torch.Tensor, torch.nn.Parameter) and _keys_of(value) in _plain_keys()


def _keys_of(tensor: Any) -> int:
    return torch._C._dispatch_keys(tensor).raw_repr()  # type: ignore[no-any-return]


@cache
def _plain_keys() -> frozenset[int]:
    found = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            found.append(_keys_of(torch.empty(0, device="cpu")))
    return frozenset(found)


def make_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Returns a function that says whether as many values are tensors like these: of the same classes, dtypes, devices, sizes,
    strides and dispatch keys, and requiring gradients as they do.

    Relies on Dynamo's `TensorGuards`, which takes 0.2 us for each.
    """
    sizes, strides = [[*each.shape] for each in tensors], [[*each.stride()] for each in tensors]
    make: Any = TensorGuards  # whose types are not those that it takes
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]


def list_parts(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors of a sparse one: values, then indices; of a COO tensor they need not be coalesced, for which torch
    has private names alone."""
    if sparse.layout is torch.sparse_coo:
        return sparse._values(), sparse._indices()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.values(), sparse.crow_indices(), sparse.col_indices()
    return sparse.values(), sparse.ccol_indices(), sparse.row_indices()
