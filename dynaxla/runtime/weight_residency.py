"""Weights that stay on the device, and the detection of writes to them.

A CPU buffer shares the weight's memory, so a write needs no action, and only a moved weight (a `.data` swap, a re-tied
or reallocated weight) must be imported again: its data address changes. A value *derived* from a weight (a folded
layout, a copy of a misaligned weight) must be derived again after any write, and autograd's version counter misses some:
`weight.data.mul_(2)` does not change it. So a storage that a value was derived from is marked copy-on-write with a single
owner. torch clears the mark at the first access that may write, through any alias, and with a single owner it neither
copies nor moves the memory: the mark is an exact dirty bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer, Client, Executable
from dynaxla.torch_api.storages import data_address, is_marked, mark, storage_key, version_of


class _Cell:
    """The number of writes detected on one storage."""

    __slots__ = ("__weakref__", "writes")

    def __init__(self) -> None:
        self.writes = 0


@dataclass(frozen=True, slots=True)
class WriteStamp:
    """The state of a tensor's memory at one moment. It keeps the storage alive, so that its address is not reused."""

    address: int
    storage: torch.UntypedStorage
    cell: _Cell
    writes: int
    version: int | None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still has the stamped memory and it was not written since."""
        if data_address(tensor) != self.address:
            return False
        if self.version is not None:
            return version_of(tensor) == self.version
        return is_marked(tensor) and self.cell.writes == self.writes


class WriteTracker:
    """Stamps tensors, to detect writes. One per process: two users of a storage must agree on its number of writes."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._lock = new_lock()

    def stamp(self, tensor: torch.Tensor) -> WriteStamp:
        """Stamps a tensor's memory.

        A storage that cannot be marked (memory that torch does not own: numpy arrays, shared memory, memory maps) is
        tracked by the version counter instead, which misses writes through `.data` and by other owners.
        """
        storage = tensor.untyped_storage()
        with self._lock:
            cell = self._cells.get(storage_key(storage))
            if cell is None:
                cell = self._cells[storage_key(storage)] = _Cell()
                weakref.finalize(storage, self._cells.pop, storage_key(storage), None)
            marked = is_marked(tensor)
            if not marked:
                cell.writes += 1
                marked = mark(tensor)
            version = None if marked else _version(tensor)
            return WriteStamp(data_address(tensor), storage, cell, cell.writes, version)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


@dataclass(frozen=True, slots=True)
class _Binding:
    """The buffers of one set of weights."""

    addresses: tuple[int, ...]
    stamps: tuple[tuple[int, WriteStamp], ...]
    imported: dict[int, Buffer]
    buffers: list[Buffer]


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The inputs that a part's programs take from its weights.

    Attributes:
        constants: the graph's constant tensors, appended to the caller's weights; they never change.
        orders: for each weight the permutation that makes it row-major, or None.
        kept: indices (into weights + constants) of the tensors that the program itself reads.
        folded: indices of the tensors that the fold reads.
        fold: returns the executable that computes the folded values from `folded`; None if nothing is folded.
    """

    constants: tuple[torch.Tensor, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    kept: tuple[int, ...]
    folded: tuple[int, ...]
    fold: Callable[[], Executable] | None

    @property
    def read(self) -> set[int]:
        """The indices of all tensors that are read."""
        return {*self.kept, *self.folded}

    def row_major(self, index: int, weight: torch.Tensor) -> torch.Tensor:
        """A dense weight permuted to its row-major memory order; any other weight unchanged."""
        order = self.orders[index]
        return weight.detach() if order is None else weight.detach().permute(order)

    def take(self, buffers: Mapping[int, Buffer]) -> list[Buffer]:
        """The program inputs of the read tensors' buffers: [kept weights and constants, folded values]."""
        folded = [] if self.fold is None else self.fold().run([buffers[i] for i in self.folded])
        return [buffers[i] for i in self.kept] + folded


class WeightResidency:
    """The device buffers of a part's weights and of the values folded from them.

    Args:
        client: the client of the buffers' device.
        watch: the process's `WriteTracker`.
    """

    def __init__(self, client: Client, watch: WriteTracker, held: PartWeights) -> None:
        self._client = client
        self._watch = watch
        self._held = held
        self._binding: _Binding | None = None
        self._lock = new_lock()
        notify_after_fork(self)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights, constants among them."""
        return bool(self._held.read)

    def after_fork(self) -> None:
        self._binding = None  # its buffers belong to the parent's client

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]:
        """Returns the buffers of [kept weights and constants, folded values]. Rebinds only if a weight moved or was written.

        Callers must not change the list. Thread-safe.
        """
        binding = self._binding
        if binding is not None and _is_current(binding, weights):
            return binding.buffers
        with self._lock:
            binding = self._binding
            if binding is None or not _is_current(binding, weights):
                with xla.load().TracebackScope():
                    binding = self._binding = self._bind((*weights, *self._held.constants), len(weights))
            return binding.buffers

    def _bind(self, held: Sequence[torch.Tensor], weights: int) -> _Binding:
        # The addresses are read first, so that a weight that moves during the binding differs at the next call.
        addresses = tuple(map(data_address, held))
        buffers = {i: self._import(i, held[i], addresses[i]) for i in self._held.read}
        copied = {i for i, buffer in buffers.items() if not self._client.shares_memory(buffer, held[i])}
        followed = sorted(i for i in {*copied, *self._held.folded} if i < weights)
        stamps = tuple((i, self._watch.stamp(held[i])) for i in followed)
        shared = {i: buffer for i, buffer in buffers.items() if i not in copied}
        return _Binding(addresses[:weights], stamps, shared, self._held.take(buffers))

    def _import(self, index: int, weight: torch.Tensor, address: int) -> Buffer:
        """Returns a buffer of the weight: the current buffer if it still shares the weight's memory, else a new one.

        An export by DLPack counts as an access that may write, so a needless import would clear the storage's mark for all
        its stamps.
        """
        binding = self._binding
        if binding is not None and index in binding.imported and binding.addresses[index : index + 1] == (address,):
            return binding.imported[index]
        return self._client.to_buffer(self._held.row_major(index, weight).contiguous())


def _is_current(binding: _Binding, weights: Sequence[torch.Tensor]) -> bool:
    if tuple(map(data_address, weights)) != binding.addresses:
        return False
    return not binding.stamps or all(stamp.holds(weights[i]) for i, stamp in binding.stamps)


def make_picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks the arguments at these indices (a part's weights)."""
    first, count = (places[0], len(places)) if places else (0, 0)
    is_run = list(places) == list(range(first, first + count))
    return itemgetter(slice(first, first + count)) if is_run else itemgetter(*places)
