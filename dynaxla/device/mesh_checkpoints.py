"""Checkpoints of tensors over a mesh by `torch.distributed.checkpoint`: a process has the shards of its devices in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.device.dispatcher import OpDispatcher
from dynaxla.device.op_call import Lyings, locate_view
from dynaxla.device.storage import DeviceStorage, find_sharding, storage_of
from dynaxla.device.view_layout import memory_order
from dynaxla.errors import DistributedError, ShardingError
from dynaxla.fx.permutations import invert_permutation
from dynaxla.mesh import Sharding
from dynaxla.runtime.mesh_devices import MeshDevices, Offsets
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.torch_api.sharded_checkpoints import NotedTensor
from dynaxla.types import DEVICE_TYPE


def locate_whole(layouts: Lyings, tensor: torch.Tensor) -> tuple[DeviceStorage, tuple[int, ...]]:
    """The memory of a tensor that has all of it, and the order of the tensor's dims in it.

    Raises:
        ShardingError: the tensor is a part of another one's memory.
    """
    memory = storage_of(tensor)
    placed, _ = locate_view(layouts, memory.spec, tensor)
    order = tuple(memory_order(tensor.stride()))
    if not placed.is_whole or memory.spec.shape != tuple(tensor.shape[dim] for dim in order):
        raise ShardingError("a view of a part of a tensor is not sharded", "take its clone, or the whole tensor")
    return memory, order


@dataclass(slots=True)
class _Read:
    """The shards of a tensor that are being read.

    Attributes:
        parts: by offsets, in the order of the memory's dims.
        missing: the elements that did not come yet.
    """

    sharding: Sharding
    parts: dict[Offsets, torch.Tensor]
    missing: int


class MeshCheckpoints:
    """What `torch.distributed.checkpoint` asks of tensors over a mesh.

    What is read comes to the devices when all shards of a tensor are there: no process ever has more of it on its host.
    """

    def __init__(self, devices: MeshDevices, eager: OpDispatcher) -> None:
        self._devices = devices
        self._eager = eager
        self._reads = WeakIdKeyDictionary()

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != DEVICE_TYPE:
            return False
        memory = get_attached_memory(tensor.untyped_storage())
        return memory is not None and find_sharding(memory) is not None

    def list_shards(self, tensor: torch.Tensor) -> list[tuple[Offsets, tuple[int, ...]]]:
        """
        Raises:
            ShardingError: the tensor is a part of another one's memory.
            DistributedError: several processes have the mesh, and no process group by which they tell who writes what.
        """
        memory, order = locate_whole(self._eager.layouts, tensor)
        sharding = find_sharding(memory)
        assert sharding is not None
        if self._devices.ranks_of(sharding.mesh) and not torch.distributed.is_initialized():
            raise DistributedError(
                "processes that share a mesh agree by a process group on who writes and reads what",
                'call torch.distributed.init_process_group("dynaxla") behind dynaxla.use',
            )
        back = invert_permutation(order)
        sizes = _permute(sharding.tile(memory.spec.shape), back)
        return [(_permute(each, back), sizes) for each in self._devices.own_offsets(memory.spec.shape, sharding)]

    def begin_write(self, tensor: torch.Tensor) -> None:
        self._reads.pop(tensor, None)

    def begin_read(self, tensor: torch.Tensor) -> None:
        memory, _ = locate_whole(self._eager.layouts, tensor)
        sharding = find_sharding(memory)
        assert sharding is not None
        own = self._devices.own_offsets(memory.spec.shape, sharding)
        tile = sharding.tile(memory.spec.shape)
        parts = {each: torch.empty(tile, dtype=memory.spec.dtype, device="cpu") for each in own}
        self._reads[tensor] = _Read(sharding, parts, sum(part.numel() for part in parts.values()))

    def open_shard(self, tensor: torch.Tensor, offsets: Offsets) -> torch.Tensor:
        memory, order = locate_whole(self._eager.layouts, tensor)
        place, back = _permute(offsets, order), invert_permutation(order)
        read: _Read | None = self._reads.get(tensor)
        if read is None:
            return self._devices.read_part(self._eager.buffer_of(memory), place).permute(back)

        def note(count: int) -> None:
            read.missing -= count
            if not read.missing:
                del self._reads[tensor]
                buffer = self._devices.put_parts(memory.spec.shape, read.sharding, read.parts)
                memory.rebind(buffer, made_by="a checkpoint")
                torch.autograd.graph.increment_version(tensor)

        return NotedTensor.of(read.parts[place].permute(back), note)


def _permute(values: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(values[dim] for dim in order)
