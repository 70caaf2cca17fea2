"""Detection of writes to memory that a value was derived from, whoever writes.

Autograd's version counter misses some: `weight.data.mul_(2)` does not change it. So a storage that a value was derived from
is marked copy-on-write with a single owner. torch clears the mark at the first access that may write, through any alias,
and with a single owner it neither copies nor moves the memory: the mark is an exact dirty bit.

A mark cannot see a write past torch: through a numpy array that shares the memory, or by another process. A storage that torch
alone does not own, or cannot mark, is compared with a copy of its contents. That reads all of it at every call; weights that a
library mapped from a file, as most pretrained models have, are therefore moved to memory of torch's own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dynaxla.isolation.forking import new_lock
from dynaxla.runtime.client import Buffer
from dynaxla.torch_api.storages import (
    count_owners,
    data_address,
    has_equal_bytes,
    is_marked,
    mark,
    move_memory,
    storage_key,
    version_of,
)

logger = logging.getLogger("dynaxla")

_WORTH_TELLING = 1 << 20
"""Bytes of which a comparison costs about 0.1 ms."""


class _Cell:
    """What is known of one storage: the number of writes detected, and of buffers that share its memory."""

    __slots__ = ("__weakref__", "buffers", "writes")

    def __init__(self) -> None:
        self.writes = self.buffers = 0

    def drop_buffer(self) -> None:
        self.buffers -= 1


@dataclass(frozen=True, slots=True)
class WriteStamp:
    """The state of a tensor's memory at one moment. It keeps the storage alive, so that its address is not reused.

    Attributes:
        contents: a copy of the tensor, where a mark does not see every write.
        version: autograd's count of writes, None for an inference tensor, which has none. A write that another thread had begun
            before the mark is counted when it ends.
    """

    address: int
    storage: torch.UntypedStorage
    cell: _Cell
    writes: int
    contents: torch.Tensor | None
    version: int | None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still has the stamped memory and it was not written since."""
        if data_address(tensor) != self.address:
            return False
        if self.contents is not None:
            return has_equal_bytes(tensor, self.contents)
        if not is_marked(tensor) or self.cell.writes != self.writes:
            return False
        return self.version is None or version_of(tensor) == self.version


def count_writes(tensor: torch.Tensor) -> int | None:
    """Autograd's count of writes to a tensor, which counts each when it ends; None for an inference tensor."""
    return None if tensor.is_inference() else version_of(tensor)


class WriteTracker:
    """Stamps tensors, to detect writes. One per process: two users of a storage must agree on its number of writes."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._lock = new_lock()
        self._compared = 0

    def stamp(self, tensor: torch.Tensor, version: int | None) -> WriteStamp:
        """Stamps a tensor's memory.

        Args:
            version: `count_writes` of it before its values were read.
        """
        storage = tensor.untyped_storage()
        with self._lock:
            cell = self._cell(storage)
            # The tensor itself is an owner, too, and so is the storage's Python object.
            is_alone = count_owners(storage) <= 2 + cell.buffers
            if is_alone and not is_marked(tensor):
                cell.writes += 1
                mark(tensor)
            contents = None if is_alone and is_marked(tensor) else tensor.detach().clone()
            if contents is not None:
                self._tell_compared(contents.nbytes)
            return WriteStamp(data_address(tensor), storage, cell, cell.writes, contents, version)

    def _tell_compared(self, size: int) -> None:
        told, self._compared = self._compared >= _WORTH_TELLING, self._compared + size
        if not told and self._compared >= _WORTH_TELLING:
            logger.warning(
                "weights lie in memory that others may write to (a numpy array, shared memory, a second tensor): every call "
                "compares them with a copy; `weight.data = weight.data.clone()` gives a weight memory of its own"
            )

    def count_buffer(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Notes that a buffer shares a tensor's memory: as long as it lives, it is one of the storage's owners."""
        with self._lock:
            cell = self._cell(tensor.untyped_storage())
            cell.buffers += 1
        weakref.finalize(buffer, cell.drop_buffer).atexit = False

    def _cell(self, storage: torch.UntypedStorage) -> _Cell:
        cell = self._cells.get(storage_key(storage))
        if cell is None:
            cell = self._cells[storage_key(storage)] = _Cell()
            weakref.finalize(storage, self._cells.pop, storage_key(storage), None)
        return cell


def move_mapped(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Moves tensors whose memory is mapped from a file to memory of torch's own, where their writes are seen.

    Only those that own the whole of their storage alone, so that nobody can tell, and whose mapping is private to the process.
    Returns the storages that were left: another thread may be reading one.
    """
    left: list[torch.UntypedStorage] = []
    foreign = [tensor for tensor in tensors if not tensor.untyped_storage().resizable()]
    private = _private_mappings() if foreign else []
    for tensor in foreign:
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        is_private = any(low <= begin and end <= high for low, high in private)
        if is_private and count_owners(storage) <= 2 and tensor.nbytes == storage.nbytes():
            move_memory(tensor)
            left.append(storage)
    return left


def _private_mappings() -> list[tuple[int, int]]:
    """The ranges of addresses that are mapped from a file for this process alone (Linux); none elsewhere."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if permissions.startswith("rw") and permissions.endswith("p") and inode != "0":
            low, high = addresses.split("-")
            found.append((int(low, 16), int(high, 16)))
    return found
