"""What the storages of device tensors hold: buffers, one for all tensors of a storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch

from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.padded_buffers import PaddedBuffer
from dynaxla.errors import ExecutionError, ForkError
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.mesh import Sharding
from dynaxla.ops.dtypes import STORED
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.mesh_devices import sharding_of
from dynaxla.runtime.transfers import buffer_bytes
from dynaxla.torch_api.private_device import attach_memory, get_attached_memory, set_view_metadata, tensor_at
from dynaxla.types import TensorSpec

_FIRST, _APART = 1 << 60, 64
"""Addresses of storages, which torch and other packages tell apart by them: where no process has memory."""


FEW_LIVE = 256
"""So many memories are not looked through for dead ones."""

MOST_ORIGIN_BYTES = 1 << 26
"""Of the host's memory; on the CPU the buffers lie there themselves."""


class WriteListener(Protocol):
    """What is told of writes."""

    def on_write(self) -> None: ...


class DeviceStorage:
    """The memory of one storage: a row-major array in a buffer, which a write replaces by another.

    Buffers never change. So two memories may have one buffer, as a tensor and its clone do until one of them is written.

    Attributes:
        spec: shape and dtype of the array.
        corner: the buffer in whose corner the array lies; None if it lies in none.
        origin: what the array was copied from, on the host; None if that is not kept.
        is_kept: whether something that is no memory has the buffer, too.
        made_by: the op that made the buffer, with the user's line.
        ranges: of values that index, by the tensor's place in the array, what the device found of them since the last write.
    """

    __slots__ = (
        "__weakref__",
        "_sharers",
        "_watchers",
        "_whole",
        "corner",
        "is_kept",
        "made_by",
        "origin",
        "ranges",
        "spec",
    )

    def __init__(self, spec: TensorSpec, buffer: Buffer | LazyBuffer | None = None) -> None:
        self.spec = spec
        self._whole = buffer
        self.corner: PaddedBuffer | None = None
        self.origin: torch.Tensor | None = None
        self.is_kept = False
        self.made_by: str | None = None
        self.ranges: dict[Hashable, Any] | None = None
        self._sharers: WeakSet[DeviceStorage] | None = None
        self._watchers: tuple[ref[WriteListener], ...] = ()

    @property
    def buffer(self) -> Buffer | None:
        """The array; None as long as nothing was written: such elements have any value. Cuts it out of a larger buffer.

        Raises:
            ExecutionError: the run that cuts it out failed at once, or that of the collected ops which make it.
        """
        if self._whole is None and self.corner is not None:
            self._whole = self.corner.cut()
        return self._buffer_in(self._whole)

    @property
    def whole(self) -> Buffer | LazyBuffer | None:
        """As `held`, but nothing is cut out of a larger buffer."""
        return self._whole

    @property
    def held(self) -> Buffer | LazyBuffer | None:
        """As `buffer`, but what collected ops make is not waited for."""
        return self.buffer if self._whole is None else self._whole

    def _buffer_in(self, held: Buffer | LazyBuffer | None) -> Buffer | None:
        if type(held) is not LazyBuffer:
            return held
        try:
            return held.buffer()
        except ExecutionError as error:
            raise self.make_error(error) from error

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written."""
        return self._whole is None and self.corner is None

    @property
    def buffers(self) -> list[Buffer]:
        """What it holds.

        Raises:
            ExecutionError: the run of the collected ops that make it failed.
        """
        held = (self._buffer_in(self._whole), None if self.corner is None else self.corner.buffer)
        return [buffer for buffer in held if buffer is not None]

    def has(self, buffer: Buffer) -> bool:
        """Whether it holds a buffer."""
        if buffer is self._whole or (self.corner is not None and buffer is self.corner.buffer):
            return True
        return type(self._whole) is LazyBuffer and buffer is self._whole.known

    @property
    def sizes_held(self) -> dict[int, int]:
        """The bytes of what it holds, or will hold when collected ops were run, by the identity of that."""
        known = self._whole.known if type(self._whole) is LazyBuffer else self._whole
        sizes = {id(self._whole): self.spec.nbytes} if known is None and self._whole is not None else {}
        held = (known, None if self.corner is None else self.corner.buffer)
        return sizes | {id(buffer): buffer_bytes(buffer) for buffer in held if buffer is not None}

    def lie_in(self, corner: PaddedBuffer) -> None:
        """The array lies in the corner of a larger buffer; nothing was written before."""
        self.corner = corner

    def tell(self, watcher: WriteListener) -> None:
        """Has a watcher told whenever the buffer is replaced, as long as it lives."""
        live = [each for each in self._watchers if each() is not None]
        if all(each() is not watcher for each in live):
            self._watchers = (*live, ref(watcher))

    @property
    def is_shared(self) -> bool:
        """Whether another has the same buffer: then it may not be given away."""
        return self.is_kept or (self._sharers is not None and len(self._sharers) > 1)

    def rebind(
        self, buffer: Buffer | LazyBuffer | None, spec: TensorSpec | None = None, made_by: str | None = None
    ) -> None:
        """Replaces the buffer, and where `spec` is given what the array is; None: it lies in a corner that comes next."""
        if spec is not None:
            self.spec = spec
        self._whole, self.corner, self.origin, self.ranges = buffer, None, None, None
        self.made_by = made_by
        self.is_kept = False
        if self._sharers is not None:
            self._sharers.discard(self)
            self._sharers = None
        for each in self._watchers:
            watcher = each()
            if watcher is not None:
                watcher.on_write()

    def exchange(self, replaced: Mapping[int, Buffer]) -> None:
        """Has another buffer with the same values, where its own was replicated.

        Args:
            replaced: by the identity of a buffer, what it is now.
        """
        buffer = replaced.get(id(self._whole))
        if buffer is not None:
            self._whole, self.origin, self.is_kept = buffer, None, True
            for each in self._watchers:
                watcher = each()
                if watcher is not None:
                    watcher.on_write()

    def share(self, other: DeviceStorage) -> None:
        """Takes the buffer and the spec of another memory."""
        self.rebind(other._whole, other.spec, other.made_by)
        self.corner, self.origin = other.corner, other.origin
        self.have_as(other)

    def have_as(self, other: DeviceStorage) -> None:
        """The buffer is that of another memory."""
        self.is_kept = other.is_kept
        if other._sharers is None:
            other._sharers = WeakSet((other,))
        other._sharers.add(self)
        self._sharers = other._sharers

    def make_error(self, error: Exception) -> ExecutionError:
        """What is raised where the buffer is read and the run that made it failed."""
        made_by = self.made_by or "an op"
        return ExecutionError(f"{made_by} failed on the device: {error}", "what it only reads is intact")


class HostSources:
    """Keeps what memories were copied from, of the latest copies: a bucket's input is padded on the host, without a program."""

    def __init__(self) -> None:
        self._kept: deque[tuple[ref[DeviceStorage], torch.Tensor]] = deque()
        self._bytes = 0
        self._lock = new_lock()

    def keep(self, memory: DeviceStorage, host: torch.Tensor) -> None:
        """Keeps a row-major array of the host's as what a memory was copied from."""
        memory.origin = host
        with self._lock:
            self._kept.append((ref(memory), host))
            self._bytes += host.nbytes
            while self._bytes > MOST_ORIGIN_BYTES:
                oldest, dropped = self._kept.popleft()
                self._bytes -= dropped.nbytes
                owner = oldest()
                if owner is not None and owner.origin is dropped:
                    owner.origin = None


def stored_spec(spec: TensorSpec) -> TensorSpec:
    """The array that a memory has for a tensor: itself, or its bytes where no program takes its dtype."""
    return spec if spec.dtype in STORED else TensorSpec((spec.nbytes,), torch.uint8)


class _Live:
    """Memories by the addresses of their storages, for as long as they live.

    Every result of every call comes here, and most are gone at the next one: what is dead is looked for now and then, when
    there are twice as many as lived before, and nothing is called at a memory's end.
    """

    def __init__(self) -> None:
        self._refs: dict[int, ref[DeviceStorage]] = {}
        self._most = FEW_LIVE

    def add(self, address: int, memory: DeviceStorage) -> None:
        """Not from two threads at once."""
        self._refs[address] = ref(memory)
        if len(self._refs) > self._most:
            self._refs = {place: each for place, each in self._refs.items() if each() is not None}
            self._most = max(FEW_LIVE, 2 * len(self._refs))

    def get(self, address: int) -> DeviceStorage | None:
        found = self._refs.get(address)
        return None if found is None else found()

    def find(self, address: int) -> tuple[int, DeviceStorage] | None:
        """The memory that has an address within it, and where it begins."""
        places = ((place, each()) for place, each in list(self._refs.items()))
        return next(((p, m) for p, m in places if m is not None and p <= address < p + max(m.spec.nbytes, 1)), None)

    def all(self) -> list[DeviceStorage]:
        return [memory for each in list(self._refs.values()) if (memory := each()) is not None]


class DeviceStorages:
    """All memories of the process, for as long as their storages live."""

    def __init__(self) -> None:
        self._live = _Live()
        self.is_lost = False
        self._next = _FIRST
        self._lock = new_lock()
        notify_after_fork(self)

    def after_fork(self) -> None:
        self.is_lost = True

    def check_process(self, platform: str) -> None:
        """Raises:
        ForkError: the process is a forked child of the one that uses the device.
        """
        if self.is_lost:
            raise ForkError(platform)

    def __len__(self) -> int:
        return len(self._live.all())

    def __iter__(self) -> Iterator[DeviceStorage]:
        return iter(self._live.all())

    @property
    def bytes_held(self) -> int:
        """Of all buffers; one that several memories have is counted once."""
        return sum({place: size for memory in self for place, size in memory.sizes_held.items()}.values())

    def exchange(self, replaced: Mapping[int, Buffer]) -> None:
        """Has memories hold what their buffers were replicated to."""
        for memory in self:
            memory.exchange(replaced)

    def of(self, tensor: torch.Tensor) -> DeviceStorage:
        """The memory of a device tensor; also of one that torch made of the address of another's storage.

        Raises:
            NotImplementedError: torch made the storage otherwise.
        """
        storage = tensor.untyped_storage()
        found = get_attached_memory(storage)
        if found is None:
            found = self._live.get(storage.data_ptr())
        if not isinstance(found, DeviceStorage):
            raise NotImplementedError(
                "torch made this storage, which has no memory on the device: copy the tensor to the CPU"
            )
        return found

    def tensor(
        self, memory: DeviceStorage, tensor: TensorSpec | None = None, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor with a storage of its own for a memory: the array itself, and row-major, where nothing else is said."""
        array = memory.spec
        spec = tensor or array
        address = self.place(memory, array.nbytes)
        made = tensor_at(
            address, spec.dtype, array.nbytes, spec.shape, strides or (None if spec.nbytes else spec.strides)
        )
        attach_memory(made.untyped_storage(), memory)
        return made

    def place(self, memory: DeviceStorage, nbytes: int) -> int:
        """A new address for a memory of so many bytes."""
        with self._lock:
            address = self._next
            self._next += (nbytes // _APART + 1) * _APART
            self._live.add(address, memory)
        return address

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives a tensor that torch made of an address within another one's storage, as for DLPack and of a slice of a
        storage, that storage.

        Raises:
            BufferError: the address is in no memory that lives, or not at an element's begin.
        """
        address = tensor.untyped_storage().data_ptr()
        found = self._live.find(address) if tensor.numel() else (address, DeviceStorage(TensorSpec((0,), tensor.dtype)))
        if found is None:
            raise BufferError("the memory of this tensor of the device is gone, or of another process")
        place, memory = found
        if (address - place) % tensor.itemsize:
            raise BufferError(
                f"an element of {tensor.dtype} begins at a multiple of {tensor.itemsize} bytes of a storage"
            )
        whole = tensor_at(place, tensor.dtype, memory.spec.nbytes, (0,), (1,)).untyped_storage()
        attach_memory(whole, memory)
        offset = (address - place) // tensor.itemsize + int(tensor.storage_offset())
        set_view_metadata(tensor, whole, tensor.shape, tensor.stride(), offset)
        return tensor


def storage_of(tensor: torch.Tensor) -> DeviceStorage:
    """The memory of a device tensor."""
    found = get_attached_memory(tensor.untyped_storage())
    assert isinstance(found, DeviceStorage)
    return found


def find_sharding(memory: DeviceStorage) -> Sharding | None:
    """How a memory's array is sharded; None if it is on one device, in a larger buffer, or what collected ops make anew."""
    buffer = memory.whole
    if type(buffer) is LazyBuffer:
        if buffer.known is None:
            return buffer.sharding
        buffer = buffer.known
    return None if buffer is None else sharding_of(buffer)


def find_no_sharding(memory: DeviceStorage) -> Sharding | None:
    """None: what a process with one device has in the place of `find_sharding`."""
    return None
