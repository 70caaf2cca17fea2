"""Compiled graphs on tensors of the device: their buffers go in as they lie, and what comes out stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dynaxla.device.copies import CopyKernels
from dynaxla.device.dispatcher import OpDispatcher
from dynaxla.device.op_call import locate_view
from dynaxla.device.padded_buffers import PaddedBuffer
from dynaxla.device.storage import DeviceStorage, DeviceStorages
from dynaxla.device.view_layout import memory_order
from dynaxla.fx.permutations import invert_permutation
from dynaxla.isolation.forking import new_lock
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.programs.argument_binder import ArgumentBinder
from dynaxla.programs.program import Program
from dynaxla.runtime.client import Buffer, DeviceTensors
from dynaxla.runtime.host_padding import PaddedShape, is_padded_view, pad, to_row_major
from dynaxla.runtime.joint_programs import JointExecutable
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import buffer_spec, upload, upload_readonly
from dynaxla.runtime.weight_residency import PartWeights
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.torch_api.storages import data_address
from dynaxla.types import TensorSpec

MOST_CROPPED = 4096
"""Every call in a bucket asks for the corners of its results."""

MOST_NUMBERS = 32
"""Vectors of so many numbers are kept on the device: most calls have those of the call before."""


class DeviceClient(DeviceTensors):
    """A client whose buffers are those of the device's tensors. It is the protocol `runtime.client.Client`."""

    shares_host_memory = False

    def __init__(self, client: PjrtClient, memories: DeviceStorages, eager: OpDispatcher, copies: CopyKernels) -> None:
        self.platform = client.platform
        self.mesh_devices = client.mesh_devices
        self.client = client
        self._memories = memories
        self._eager = eager
        self._copies = copies
        self.prepare, self.compile, self.load, self.identity = (
            client.prepare,
            client.compile,
            client.load,
            client.identity,
        )

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        """The buffer that a tensor of the device is all of, row-major, copied where it is not; of the host's a copy."""
        if self._memories.is_lost:
            self._memories.check_process(self.platform)
        memory = get_attached_memory(tensor.untyped_storage())
        if memory is None:
            return self._of_host(tensor)
        spec, is_lazy = memory.spec, tensor.is_neg() or tensor.is_conj()
        if is_lazy or tensor.dtype is not spec.dtype or tensor.shape != spec.shape or not tensor.is_contiguous():
            placed, _ = locate_view(self._eager.layouts, spec, tensor)
            if is_lazy or not placed.is_plain:
                memory = self._memories.of(self._copies.row_major(tensor))
        return self._eager.buffer_of(memory)

    def _of_host(self, tensor: torch.Tensor) -> Buffer:
        """Of the host come a graph's own constants, plain numbers and, at every call of a bucket, its true sizes."""
        if tensor.dim() == 1 and tensor.numel() <= MOST_NUMBERS and tensor.dtype in (torch.int64, torch.float64):
            return self._eager.vectors.buffer(tensor.dtype, tensor.tolist())
        return upload(self.client, to_row_major(tensor))

    def upload_padded(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        """A buffer of a larger shape with a tensor of the host in its corner."""
        return upload_readonly(self.client, pad(tensor, padded))

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """A tensor of the device that has the buffer; nothing waits for it."""
        memory = DeviceStorage(buffer_spec(buffer), buffer)
        memory.made_by = "a compiled graph"
        return self._memories.tensor(memory)

    def assign(self, tensor: torch.Tensor, buffer: Buffer, made_by: str) -> None:
        """Gives a tensor the elements of a buffer of its shape and dtype; of a tensor that is all of its memory nothing is
        copied."""
        memory, spec = self._memories.of(tensor), buffer_spec(buffer)
        is_all = tensor.is_contiguous() and memory.spec.nbytes == spec.nbytes and memory.spec.dtype is spec.dtype
        if is_all and not (tensor.is_neg() or tensor.is_conj()):
            memory.rebind(buffer, spec, made_by)
        else:
            with torch.no_grad():
                tensor.copy_(self.to_tensor(buffer))

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        """A buffer never changes: what is written to the tensor later is in another one."""
        return False

    def make_binder(self, weights: Sequence[int], held: PartWeights) -> DeviceBinder:
        """The binder of a part's arguments."""
        residency = DeviceResidency(self, self._memories, held)
        kind = DeviceBinder if self.client.peers is None else JointBinder
        return kind(self, weights, residency, self._memories, self._eager)


class DeviceBinder(ArgumentBinder):
    """Binds tensors of the device: their buffers are arguments, and results stay on it."""

    def __init__(
        self,
        client: DeviceClient,
        weights: Sequence[int],
        residency: DeviceResidency,
        memories: DeviceStorages,
        eager: OpDispatcher,
    ) -> None:
        super().__init__(client, weights, residency, client.to_buffer)
        self._client = client
        self._memories = memories
        self._eager = eager

    def run_donating(self, program: Program, args: Sequence[Any], buffers: list[Buffer]) -> list[torch.Tensor]:
        """Runs a program that takes memory of the caller's tensors for their new values, which they have afterwards.

        A buffer that something else has, too, is copied first: once, as the new one is the tensor's alone.

        Raises:
            ExecutionError: the run failed at once; what it had taken is lost, and reading it raises.
        """
        assert program.executable is not None
        self._eager.run_pending()  # pending ops hold buffers that would be taken from them
        repeated = len(set(map(id, buffers))) < len(buffers)
        owners = []
        for each in program.donated:
            tensor, given = args[each.position], buffers[each.argument]
            memory = get_attached_memory(tensor.untyped_storage())
            is_all = self._is_all(tensor, memory, each.order)
            owners.append(memory if is_all else None)
            if memory.has(given):
                is_wanted = (
                    not is_all or memory.is_shared or (repeated and sum(given is other for other in buffers) > 1)
                )
                buffers[each.argument] = self._eager.corners.copy(given) if is_wanted else given
        bound: dict[int, torch.Tensor] = {}
        with defer_interrupts():  # the run takes the memory of tensors, which have to get their new values
            results = program.executable.run(buffers)
            for each, owner in zip(program.donated, owners, strict=True):
                bound[each.result] = tensor = args[each.position]
                if owner is not None:
                    self._rebind(owner, results[each.result])
                else:
                    new = self._to_tensor(results[each.result])
                    new = new if each.order is None else new.permute(each.order)
                    tensor.copy_(new[tuple(map(slice, tensor.shape))])
        return [bound[i] if i in bound else self._to_tensor(result) for i, result in enumerate(results)]

    def _is_all(self, tensor: torch.Tensor, memory: DeviceStorage, order: Sequence[int] | None) -> bool:
        """Whether a tensor is all of a memory, its dims in the order of the result that is its new value."""
        spec = memory.spec
        if order is None and tensor.dtype is spec.dtype and tensor.shape == spec.shape and tensor.is_contiguous():
            return True
        torch_layout = tensor if order is None else tensor.permute(invert_permutation(order))
        return locate_view(self._eager.layouts, spec, torch_layout)[0].is_plain

    def _rebind(self, memory: DeviceStorage, result: Buffer) -> None:
        """Gives a memory its new array, which lies in the result, or in its corner."""
        sizes = result.shape
        if sizes == memory.spec.shape:
            memory.rebind(result, made_by="a compiled graph")
        else:
            memory.rebind(None, made_by="a compiled graph")
            memory.lie_in(PaddedBuffer(result, sizes, memory.spec, self._eager.corners))

    def bind_padded(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        """A buffer of a larger shape with a tensor in its corner: that in which it lies, or a copy.

        What was just copied from the host is padded there; else a small program does it, for each shape.
        """
        self._memories.check_process(self._client.platform)
        if tensor.shape == padded.sizes or is_padded_view(tensor, padded):
            return self._to_buffer(pad(tensor, padded))
        memory = get_attached_memory(tensor.untyped_storage())
        if memory is None:
            return self._client.upload_padded(tensor, padded)
        placed, _ = locate_view(self._eager.layouts, memory.spec, tensor)
        if placed.is_plain:
            if memory.corner is not None:
                return self._eager.corners.put(memory.corner.buffer, padded.sizes)
            if memory.origin is not None and memory.origin.dtype is tensor.dtype:
                return self._client.upload_padded(memory.origin, padded)
        return self._eager.corners.put(self._to_buffer(tensor), padded.sizes)

    def crop_lazily(self, tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor | None:
        """The corner of a program's result, which is cut out where somebody reads it that does not take all of the buffer."""
        whole = get_attached_memory(tensor.untyped_storage())
        padded = whole.spec.shape, tensor.shape, tensor.stride(), tensor.dtype
        found = _cropped(*padded, tuple(sizes), tuple(strides))
        if found is None:
            return None
        spec, made, torch_layout = found
        memory = DeviceStorage(spec)
        memory.made_by = whole.made_by
        memory.lie_in(PaddedBuffer(whole.buffer, whole.spec.shape, spec, self._eager.corners))
        return self._memories.tensor(memory, made, torch_layout)


class JointBinder(DeviceBinder):
    """Binds tensors of the device in a process that is joined with others."""

    def run(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        """Has the processes of a program compare their sizes: in one bucket, a collective would take padding for elements."""
        if program.cropping is not None and isinstance(program.executable, JointExecutable):
            program.executable.note_sizes(program.cropping.pick(values))
        return super().run(program, values, args)


@lru_cache(MOST_CROPPED)
def _cropped(
    array: tuple[int, ...],
    shape: tuple[int, ...],
    torch_layout: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[TensorSpec, TensorSpec, tuple[int, ...] | None] | None:
    """Of a corner of a result of this shape and these strides, in an array: its array, its tensor, and the tensor's strides
    where it is not row-major; None where they are of another order."""
    order = memory_order(torch_layout)
    spec = TensorSpec(tuple(sizes[dim] for dim in order), dtype)
    own = dict(zip(order, spec.strides, strict=True))
    alike = (size <= 1 or own[dim] == strides[dim] for dim, size in enumerate(sizes))
    if array != tuple(shape[dim] for dim in order) or 0 in sizes or not all(alike):
        return None
    made = TensorSpec(sizes, dtype)
    return spec, made, None if strides == made.strides else strides


@dataclass(frozen=True, slots=True)
class _Binding:
    """The weights as they were bound: where each is, and what programs take."""

    addresses: tuple[int, ...]
    buffers: list[Buffer]


class DeviceResidency:
    """The buffers of a part's weights and of what is folded from them, see `runtime.weight_residency.WeightResidency`.

    A write gives a memory another buffer, of which this is told: what was bound is out of date then.
    """

    def __init__(self, client: DeviceClient, memories: DeviceStorages, held: PartWeights) -> None:
        self._client = client
        self._memories = memories
        self._held = held
        self._binding: _Binding | None = None
        self._is_stale = True
        self._lock = new_lock()

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of [kept weights and constants, folded values]. The list must not be changed. Safe from several threads.

        Raises:
            ForkError: the device is the parent's.
        """
        binding = self._binding
        if binding is not None and self._is_current(binding, weights):
            return binding.buffers
        self._memories.check_process(self._client.platform)
        with self._lock:
            binding = self._binding
            if binding is None or not self._is_current(binding, weights):
                self._binding = None  # out of date, and not to be taken for current where binding fails
                binding = self._binding = self._bind(weights)
            return binding.buffers

    def on_write(self) -> None:
        """A weight has other values."""
        self._is_stale = True

    def _is_current(self, binding: _Binding, weights: Sequence[torch.Tensor]) -> bool:
        is_valid = not self._is_stale and not self._memories.is_lost
        return is_valid and tuple(map(data_address, weights)) == binding.addresses

    def _bind(self, weights: Sequence[torch.Tensor]) -> _Binding:
        found = [get_attached_memory(weight.untyped_storage()) for weight in weights]
        memories = tuple(memory for memory in found if memory is not None)
        self._is_stale = False  # before any buffer is read: a write by another thread comes behind
        for memory in memories:
            memory.tell(self)
        # A number of the host among them, whose writes nobody tells: bound at every call.
        addresses = tuple(map(data_address, weights)) if len(memories) == len(weights) else ()
        held = (*weights, *self._held.constants)
        buffers = {i: self._client.to_buffer(self._held.row_major(i, held[i])) for i in self._held.read}
        return _Binding(addresses, self._held.take(buffers))
