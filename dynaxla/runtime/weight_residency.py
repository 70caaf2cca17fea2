"""Weights that stay on the device, and how a write to one is seen.

A CPU buffer shares the weight's memory, so a write shows by itself and only a moved weight (a `.data` swap, a re-tied or
reallocated weight) must be imported again: its data address changes. Whatever is *derived* from a weight (a folded
layout, a copy of a misaligned one) must be derived again after any write, and autograd's version counter does not see
all of them: `weight.data.mul_(2)` leaves it alone. So a storage that was read to derive something is marked
copy-on-write with a single owner. torch clears the mark at the first access that may write, through whatever alias, and
with one owner it does so without copying or moving the memory: the mark is an exact dirty bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from dynaxla.isolation.forking import follow, new_lock
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer, Client, Executable
from dynaxla.torch_api.storages import data_address, is_marked, mark, storage_key, version_of


class _Cell:
    """Counts the writes seen on one storage."""

    __slots__ = ("__weakref__", "writes")

    def __init__(self) -> None:
        self.writes = 0


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a tensor's memory at one moment; holds its storage alive, so that its address stays its own."""

    address: int
    storage: torch.UntypedStorage
    cell: _Cell
    writes: int
    version: int | None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still has the memory that was stamped and nothing has written to it since."""
        if data_address(tensor) != self.address:
            return False
        if self.version is not None:
            return version_of(tensor) == self.version
        return is_marked(tensor) and self.cell.writes == self.writes


class WriteWatch:
    """Stamps tensors. One per process: two users of one storage must agree on how often it was written."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._lock = new_lock()

    def stamp(self, tensor: torch.Tensor) -> Stamp:
        """Stamps a tensor's memory.

        A storage that cannot be marked (memory that torch does not own: numpy arrays, shared memory, memory maps) is
        followed by the version counter instead, which misses writes through `.data` and through other owners.
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
            return Stamp(data_address(tensor), storage, cell, cell.writes, version)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


@dataclass(frozen=True, slots=True)
class _Binding:
    """The buffers that stand for one set of weights."""

    addresses: tuple[int, ...]
    stamps: tuple[tuple[int, Stamp], ...]
    imported: dict[int, Buffer]
    buffers: list[Buffer]


@dataclass(frozen=True, slots=True)
class Held:
    """What a part's programs take of its weights.

    Attributes:
        constants: tensors of the graph itself; they count as further weights, behind the caller's, that never change.
        orders: for each weight the permutation that makes it row-major, or None.
        kept: positions (among weights and constants) of those the program itself reads.
        folded: positions of those that the fold reads.
        fold: gives the executable that computes the folded values from the weights at `folded`; None where nothing is folded.
    """

    constants: tuple[torch.Tensor, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    kept: tuple[int, ...]
    folded: tuple[int, ...]
    fold: Callable[[], Executable] | None

    @property
    def read(self) -> set[int]:
        """The positions of all that is read."""
        return {*self.kept, *self.folded}

    def row_major(self, index: int, weight: torch.Tensor) -> torch.Tensor:
        """A weight as it lies in memory, if that is dense."""
        order = self.orders[index]
        return weight.detach() if order is None else weight.detach().permute(order)

    def taken(self, buffers: Mapping[int, Buffer]) -> list[Buffer]:
        """What programs take, of the buffers of what is read: [kept weights and constants, folded values]."""
        folded = [] if self.fold is None else self.fold().run([buffers[i] for i in self.folded])
        return [buffers[i] for i in self.kept] + folded


class Residency:
    """The device buffers of a part's weights and of everything folded from them.

    Args:
        client: where the buffers live.
        watch: the process's watch.
    """

    def __init__(self, client: Client, watch: WriteWatch, held: Held) -> None:
        self._client = client
        self._watch = watch
        self._held = held
        self._binding: _Binding | None = None
        self._lock = new_lock()
        follow(self)

    def after_fork(self) -> None:
        self._binding = None  # its buffers are of the parent's client

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of [kept weights and constants, folded values]; bound again only where a weight moved or was written.

        The list must not be changed. Safe from several threads.
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
        # The addresses are read first: a weight that moves meanwhile then differs at the next call.
        addresses = tuple(map(data_address, held))
        buffers = {i: self._import(i, held[i], addresses[i]) for i in self._held.read}
        copied = {i for i, buffer in buffers.items() if not self._client.shares_memory(buffer, held[i])}
        followed = sorted(i for i in {*copied, *self._held.folded} if i < weights)
        stamps = tuple((i, self._watch.stamp(held[i])) for i in followed)
        shared = {i: buffer for i, buffer in buffers.items() if i not in copied}
        return _Binding(addresses[:weights], stamps, shared, self._held.taken(buffers))

    def _import(self, index: int, weight: torch.Tensor, address: int) -> Buffer:
        """A buffer of the weight; the one at hand if it still shares the weight's memory.

        Handing memory to DLPack counts as an access that may write, so importing anew without need would unmark the
        storage for everyone who stamped it.
        """
        binding = self._binding
        if binding is not None and index in binding.imported and binding.addresses[index : index + 1] == (address,):
            return binding.imported[index]
        return self._client.to_buffer(self._held.row_major(index, weight).contiguous())


def _is_current(binding: _Binding, weights: Sequence[torch.Tensor]) -> bool:
    if tuple(map(data_address, weights)) != binding.addresses:
        return False
    return all(stamp.holds(weights[i]) for i, stamp in binding.stamps)


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What picks a part's weights, at these places, out of its arguments."""
    first, count = (places[0], len(places)) if places else (0, 0)
    is_run = list(places) == list(range(first, first + count))
    return itemgetter(slice(first, first + count)) if is_run else itemgetter(*places)
