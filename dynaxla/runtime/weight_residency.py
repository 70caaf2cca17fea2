"""Weights that stay on the device.

A CPU buffer shares the weight's memory, so a write needs no action, and only a moved weight (a `.data` swap, a re-tied
or reallocated weight) must be imported again: its data address changes. A value *derived* from a weight (a folded
layout, a copy of a misaligned weight) must be derived again after any write (`write_tracking`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.runtime import xla
from dynaxla.runtime.client import HOST_ALIGNMENT, Buffer, Client, Executable
from dynaxla.runtime.write_tracking import WriteStamp, WriteTracker, count_writes, move_mapped
from dynaxla.torch_api.storages import data_address


@dataclass(frozen=True, slots=True)
class _Binding:
    """The buffers of one set of weights.

    Attributes:
        left: storages of weights that were moved.
    """

    addresses: tuple[int, ...]
    stamps: tuple[tuple[int, WriteStamp], ...]
    imported: dict[int, Buffer]
    buffers: list[Buffer]
    left: Sequence[torch.UntypedStorage]


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
        left = move_mapped([held[i] for i in self._held.read if i < weights and self._derives(i, held[i])])
        # These are read first, so that a weight that moves, or is written to, during the binding differs at the next call.
        addresses, versions = tuple(map(data_address, held)), tuple(map(count_writes, held))
        buffers = {i: self._import(i, held[i], addresses[i]) for i in self._held.read}
        copied = {i for i, buffer in buffers.items() if not self._client.shares_memory(buffer, held[i])}
        followed = sorted(i for i in {*copied, *self._held.folded} if i < weights)
        stamps = tuple((i, self._watch.stamp(held[i], versions[i])) for i in followed)
        shared = {i: buffer for i, buffer in buffers.items() if i not in copied}
        # What is derived is derived from the very values that later ones are compared with.
        compared = {i: stamp.contents for i, stamp in stamps if stamp.contents is not None}
        buffers.update((i, self._to_buffer(i, contents)) for i, contents in compared.items())
        return _Binding(addresses[:weights], stamps, shared, self._held.take(buffers), left)

    def _derives(self, index: int, weight: torch.Tensor) -> bool:
        """Whether a value is derived from a weight: a folded one, or a copy of what a buffer cannot share."""
        is_shared = self._client.shares_host_memory and data_address(weight) % HOST_ALIGNMENT == 0
        return index in self._held.folded or not is_shared

    def _import(self, index: int, weight: torch.Tensor, address: int) -> Buffer:
        """Returns a buffer of the weight: the current buffer if it still shares the weight's memory, else a new one.

        An export by DLPack counts as an access that may write, so a needless import would clear the storage's mark for all
        its stamps.
        """
        binding = self._binding
        if binding is not None and index in binding.imported and binding.addresses[index : index + 1] == (address,):
            return binding.imported[index]
        buffer = self._to_buffer(index, weight)
        if self._client.shares_memory(buffer, weight):
            self._watch.count_buffer(buffer, weight)
        return buffer

    def _to_buffer(self, index: int, weight: torch.Tensor) -> Buffer:
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
