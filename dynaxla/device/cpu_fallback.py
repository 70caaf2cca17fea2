"""Calls that eager PyTorch computes on the host: memories are copied there, and what was written is copied back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import OnlyStrided
from dynaxla.device.storage import (
    DeviceStorage,
    DeviceStorages,
    HostSources,
    find_no_sharding,
    find_sharding,
    storage_of,
    stored_spec,
)
from dynaxla.device.view_layout import memory_order
from dynaxla.errors import ExecutionError
from dynaxla.observe.usage import CrossedBytes
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import download, upload_readonly
from dynaxla.torch_api.private_device import copy_view_metadata, get_attached_memory, set_view_metadata
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only
from dynaxla.torch_api.storages import list_parts, storage_key, version_of
from dynaxla.types import DEVICE_TYPE, TensorSpec

MOST_DIMS = 64
"""Of tensors that numpy, and torch's reductions, take."""

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class CpuFallbackRunner:
    """Runs calls on the host.

    Args:
        generator: makes the generator of a call that draws random numbers and names none.
    """

    def __init__(self, client: PjrtClient, memories: DeviceStorages, generator: Callable[[], torch.Generator]) -> None:
        self._client = client
        self._memories = memories
        self._generator = generator
        self._origins = HostSources()
        self._find_sharding = find_no_sharding if client.mesh_devices is None else find_sharding

    def run(self, known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, CrossedBytes]:
        """What the op gives of copies of its arguments, in which views share memory as they do on the device; and what crossed.

        Raises:
            whatever the op raises for the arguments.
        """
        copies = _Copies(self.read)
        with torch.inference_mode(False):  # where tensors count the writes to them
            host_args, host_kwargs = tree_map_only(torch.Tensor, copies.tensor, (tuple(args), dict(kwargs)))
        host_args, host_kwargs = tree_map_only(torch.device, _on_host, (host_args, host_kwargs))
        if "generator" in known.names[len(args) :] and host_kwargs.get("generator") is None:
            host_kwargs["generator"] = self._generator()
        if copies.sparse:
            copies.follow_gradients()
        results = known.op(*host_args, **host_kwargs)
        crossed = CrossedBytes(to_host=copies.count_bytes())
        for memory, array, before in copies.arrays.values():
            if known.written or version_of(array) != before:
                self.fill(memory, array, str(known.op))
                crossed += CrossedBytes(to_device=array.nbytes)
        if copies.sparse and known.written:
            given = {**dict(zip(known.names, args, strict=False)), **kwargs}
            written = tree_leaves([given.get(name) for name in known.written])
            crossed += CrossedBytes(to_device=copies.write_sparse(written))
        for (tensor, copy), before in zip(copies.tensors, copies.versions, strict=True):
            if known.counted == "nobody" and version_of(copy) != before:
                torch.autograd.graph.increment_version(tensor)
            if (copy.shape, copy.stride()) != (tensor.shape, tensor.stride()):
                self._resize(tensor, copy, copies)
        crossed += CrossedBytes(to_device=sum(_count_bytes(t) for t in tree_leaves(results) if copies.is_new(t)))
        return tree_map_only(torch.Tensor, lambda result: self._back(result, copies), results), crossed

    def read(self, memory: DeviceStorage) -> torch.Tensor:
        """A memory's array, on the host, in memory of its own.

        Raises:
            ExecutionError: the run that made it failed.
            RuntimeError: it has over 64 dims, and numpy would have to copy it.
        """
        spec = memory.spec
        if memory.is_empty:
            return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu")
        if len(spec.shape) > MOST_DIMS and not self._client.shares_host_memory:
            raise RuntimeError(f"only tensors with up to {MOST_DIMS} dims are supported")
        buffer = memory.buffers[0]
        try:
            held = download(self._client, buffer)
            return held if held.shape == spec.shape else held[tuple(map(slice, spec.shape))].contiguous()
        except ExecutionError as error:
            raise memory.make_error(error) from error

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor of the device with the values of one of the host, and its strides where that is dense."""
        _check_strided(host)
        host = host.resolve_conj().resolve_neg()
        dense = host.permute(memory_order(host.stride()))
        strides = host.stride() if dense.is_contiguous() else None
        array = dense if strides is not None else host
        memory = DeviceStorage(TensorSpec((0,), torch.uint8))
        self.fill(memory, array, "a copy from the host")
        return self._memories.tensor(memory, TensorSpec.from_tensor(host), strides)

    def fill(self, memory: DeviceStorage, array: torch.Tensor, made_by: str) -> None:
        """Gives a memory a row-major array of the host's for its own."""
        spec = stored_spec(TensorSpec.from_tensor(array))
        host = array.clone(memory_format=torch.contiguous_format)
        if spec.dtype is not array.dtype:
            host = host.view(-1).view(torch.uint8)
        sharding = self._find_sharding(memory) if memory.spec.shape == spec.shape else None
        if sharding is not None:
            memory.rebind(self._client.mesh_devices.put(host, sharding), spec, made_by)
            return
        memory.rebind(upload_readonly(self._client, host), spec, made_by)
        self._origins.keep(memory, host)

    def _resize(self, tensor: torch.Tensor, copy: torch.Tensor, copies: _Copies) -> None:
        """Gives a tensor the sizes that the op gave its copy: in its own storage, if that is large enough, as eager does."""
        storage, array = tensor.untyped_storage(), copies.arrays[id(storage_of(tensor))][1]
        stays = storage_key(copy.untyped_storage()) == storage_key(array.untyped_storage())
        if stays and copy.untyped_storage().nbytes() <= storage.nbytes():
            set_view_metadata(tensor, storage, copy.shape, copy.stride(), int(copy.storage_offset()))
        else:
            copy_view_metadata(tensor, self.tensor(copy))

    def _back(self, result: torch.Tensor, copies: _Copies) -> torch.Tensor:
        """A result as a tensor of the device: the argument that it is, a view of one, or a new one."""
        for tensor, copy in (*copies.tensors, *copies.sparse):
            if copy is result:
                return tensor
        if result.layout in SPARSE:
            return result.to(DEVICE_TYPE)
        _check_strided(result)
        owner = copies.owner(result)
        if owner is None:
            return self.tensor(result)
        return _with_bits_of(result, owner.detach().as_strided(result.shape, result.stride(), result.storage_offset()))


class _Copies:
    """Copies on the host of a call's memories, and the tensors that lie in them."""

    def __init__(self, read: Callable[[DeviceStorage], torch.Tensor]) -> None:
        self._read = read
        self.arrays: dict[int, tuple[DeviceStorage, torch.Tensor, int]] = {}
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.versions: list[int] = []
        self.sparse: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: dict[int, torch.Tensor] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor: one, however often a call has it."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._copy(tensor)
        return self._made[id(tensor)]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout in SPARSE:
            self.sparse.append((tensor, tensor.to("cpu")))
            return self.sparse[-1][1]
        if get_attached_memory(tensor.untyped_storage()) is None:
            return tensor
        memory = storage_of(tensor)
        if id(memory) not in self.arrays:
            array = self._read(memory)
            self.arrays[id(memory)] = memory, array, version_of(array)
        array = self.arrays[id(memory)][1]
        typed = array if array.dtype is tensor.dtype else _bytes_as(array, tensor.dtype)
        copy = _with_bits_of(tensor, typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        self.tensors.append((tensor, copy))
        self.versions.append(version_of(copy))
        return copy

    def follow_gradients(self) -> None:
        """Has copies need gradients as the tensors do, by which the reduced product keeps what its gradient reads."""
        for tensor, copy in (*self.tensors, *self.sparse):
            copy.requires_grad_(tensor.requires_grad)

    def write_sparse(self, written: Sequence[Any]) -> int:
        """Gives sparse tensors that were written the values of their copies, whose bytes it returns."""
        places, total = set(map(id, written)), 0
        for tensor, copy in self.sparse:
            if id(tensor) in places:
                if tensor.layout is not torch.sparse_coo and tensor.values().shape != copy.values().shape:
                    tensor.resize_as_sparse_(copy.to(DEVICE_TYPE))
                tensor.copy_(copy)
                total += _count_bytes(copy)
        return total

    def count_bytes(self) -> int:
        """Of all copies."""
        return sum(
            _count_bytes(copy) for copy in (*(a for _, a, _ in self.arrays.values()), *(c for _, c in self.sparse))
        )

    def is_new(self, result: Any) -> bool:
        """Whether a result is a tensor in memory of its own."""
        if not isinstance(result, torch.Tensor) or result.layout in SPARSE:
            return isinstance(result, torch.Tensor) and all(copy is not result for _, copy in self.sparse)
        return result.layout is torch.strided and self.owner(result) is None

    def owner(self, result: torch.Tensor) -> torch.Tensor | None:
        """The tensor of the device in whose memory a result lies."""
        place = storage_key(result.untyped_storage())
        return next((t for t, copy in self.tensors if storage_key(copy.untyped_storage()) == place), None)


def _with_bits_of(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A view whose elements are conjugated and negated lazily where another tensor's are."""
    if view.is_conj() != tensor.is_conj():
        view = view.conj()
    return view if view.is_neg() == tensor.is_neg() else torch.ops.aten._neg_view.default(view)


def _count_bytes(host: torch.Tensor) -> int:
    """The bytes of a tensor of the host; of a sparse one, of its parts."""
    return sum(part.nbytes for part in ([host] if host.layout is torch.strided else list_parts(host)))


def _check_strided(host: torch.Tensor) -> None:
    """
    Raises:
        OnlyStrided: a tensor of the host has no twin on the device.
    """
    if host.layout is not torch.strided or host.is_quantized or host.is_nested:
        raise OnlyStrided(f"{host.layout} {host.dtype}")


def _bytes_as(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(array.untyped_storage())  # type: ignore[no-any-return, call-overload]


def _on_host(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == DEVICE_TYPE else device
