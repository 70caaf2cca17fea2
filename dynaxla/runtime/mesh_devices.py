"""The devices of a process as meshes use them: arrays with one shard on each, put there and read back.

A sharded array is a JAX array with a `NamedSharding`, of which there is one object for each value: a program tells the
shardings of its arguments apart by the identity of these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.errors import ShardingError
from dynaxla.mesh import Mesh, Sharding, replicate
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import buffer_spec, upload_readonly
from dynaxla.torch_api.storages import to_capsule
from dynaxla.types import TensorSpec

MOST_SHARDINGS = 4096


class MeshDevices:
    """The devices of a client.

    Args:
        client: the client of one of them, whose buffers other tensors have.

    Attributes:
        in_use: whether a mesh was made: programs are then compiled when their arguments are known.
        moves_by_program: whether a program brings what is sharded to another sharding; else the host does, whose memory it is.
        on_replicated: is told of buffers that were replicated onto a mesh: by the identity of a buffer, what it is now.
        find_sharding: says how a tensor is sharded.
        programs: over meshes, each with what it computes, and whether it is a part of a compiled graph.
        gathered: by parameter, the axis over which it is split and along which a compiled graph gathers it before its use.
    """

    def __init__(self, client: PjrtClient) -> None:
        from jax.sharding import NamedSharding

        self._client = client
        self._kind = NamedSharding
        self._replicas: dict[int, tuple[ref[Any], Buffer]] = {}
        self.in_use = False
        self.moves_by_program = not client.shares_host_memory
        self.on_replicated: Callable[[Mapping[int, Buffer]], None] = lambda replaced: None
        self.find_sharding: Callable[[torch.Tensor], Sharding | None] = lambda tensor: None
        self.gathered = WeakIdKeyDictionary()
        self.programs: WeakKeyDictionary[PjrtExecutable, tuple[str, bool]] = WeakKeyDictionary()

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(self._client.list_devices())

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises ShardingError if a mesh has more devices than there are."""
        if mesh.size > len(self.devices):
            raise ShardingError(
                f"the mesh {mesh} has {mesh.size} devices, and there are {len(self.devices)} here",
                "on the CPU: dynaxla.use('cpu', devices=8) where the program begins",
            )

    def to_named(self, sharding: Sharding) -> Any:
        """JAX's sharding: one object for each value."""
        return _named(self.devices, sharding)

    # Arrays

    def put(self, host: torch.Tensor, sharding: Sharding) -> Buffer:
        """A sharded array of a host tensor, which it copies."""
        named, shape = self.to_named(sharding), tuple(host.shape)
        parts: dict[Any, Any] = {}
        shards = []
        for device, place in named.addressable_devices_indices_map(shape).items():
            key = str(place)
            if key not in parts:
                parts[key] = host[place].clone(memory_format=torch.contiguous_format)
            shards.append(self._put_on(parts[key], device))
        return _assemble(shape, named, shards)

    def put_zeros(self, spec: TensorSpec, sharding: Sharding) -> Buffer:
        """A sharded array of zeros, made of one shard of the host's."""
        tile = torch.zeros(sharding.tile(spec.shape), dtype=spec.dtype, device="cpu")
        named = self.to_named(sharding)
        return _assemble(
            spec.shape, named, [self._put_on(tile, device) for device in self.devices[: sharding.mesh.size]]
        )

    def _put_on(self, host: torch.Tensor, device: Any) -> Buffer:
        with xla.load().TracebackScope():
            if self._client.shares_host_memory:
                return xla.load().to_buffer(to_capsule(host), device, None)
            return xla.copy_to_device(upload_readonly(self._client, host), device)

    def read(self, buffer: Buffer) -> torch.Tensor:
        """A sharded array's values on the host, in memory of their own."""
        spec = buffer_spec(buffer)
        made = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        for shard in buffer.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = self._client.to_tensor(shard.data)
        return made

    def export(self, buffer: Buffer, export_plain: Callable[[], Any]) -> Any:
        """The DLPack capsule of a buffer; of a sharded one that of its values on the host."""
        return to_capsule(self.read(buffer)) if type(buffer.sharding) is self._kind else export_plain()

    def reshard(self, buffer: Buffer, sharding: Sharding) -> Buffer:
        """The same values, sharded so. They go through the host, unless they are only copied to each device."""
        if sharding_of(buffer) == sharding:
            return buffer
        if is_sharded(buffer):
            return self.put(self.read(buffer), sharding)
        if sharding.is_replicated and not self._client.shares_host_memory:
            devices = self.devices[: sharding.mesh.size]
            copies = [xla.copy_to_device(buffer, device) for device in devices]
            return _assemble(buffer.shape, self.to_named(sharding), copies)
        return self.put(self._client.to_tensor(buffer), sharding)

    def replicate(self, buffer: Buffer, mesh: Mesh) -> Buffer:
        """The whole of a device's buffer on every device of a mesh, once for each buffer."""
        known = self._replicas.get(id(buffer))
        if known is not None and known[0]() is buffer and sharding_of(known[1]).mesh == mesh:  # type: ignore[union-attr]
            return known[1]
        made = self.reshard(buffer, replicate(mesh, len(buffer.shape)))
        place = id(buffer)
        self._replicas[place] = ref(buffer, lambda _: self._replicas.pop(place, None)), made
        return made

    # Programs

    def key_of(self, buffers: Sequence[Buffer]) -> tuple[int, ...]:
        """What tells apart how buffers are sharded; zeros where none is."""
        kind = self._kind
        return tuple([id(s) if type(s := buffer.sharding) is kind else 0 for buffer in buffers])

    def set_results(self, executable: PjrtExecutable, specs: Sequence[TensorSpec], mesh: Mesh) -> list[int]:
        """Has an executable give sharded arrays; returns which of its results have shardings that no spec describes."""
        named = _mesh_of(self.devices, mesh)
        found: list[Sharding | None] = []
        for spec, axes in zip(specs, xla.read_output_axes(executable.handle, named, len(specs)), strict=True):
            dims = None if axes is None else axes + ((),) * (len(spec.shape) - len(axes))
            sharding = None if dims is None else Sharding(mesh, dims)
            found.append(sharding if sharding is not None and sharding.divides(spec.shape) else None)
        if None not in found:
            made = zip(specs, found, strict=True)
            executable.set_result_handlers([xla.global_handler(s.shape, s.dtype, self.to_named(o)) for s, o in made])  # type: ignore[arg-type]
        return [i for i, sharding in enumerate(found) if sharding is None]


def is_sharded(buffer: Buffer) -> bool:
    """Whether a buffer is an array over a mesh."""
    from jax.sharding import NamedSharding

    return type(buffer.sharding) is NamedSharding


def sharding_of(buffer: Buffer) -> Sharding | None:
    """How a buffer is sharded; None if it is on one device."""
    return _sharding_of(buffer.sharding) if is_sharded(buffer) else None


@lru_cache(MOST_SHARDINGS)
def _sharding_of(named: Any) -> Sharding:
    dims = tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in named.spec)
    return Sharding(Mesh(tuple(named.mesh.devices.shape), tuple(named.mesh.axis_names)), dims)


@cache
def _mesh_of(devices: tuple[Any, ...], mesh: Mesh) -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices[: mesh.size]).reshape(mesh.shape), mesh.axes)


@cache
def _named(devices: tuple[Any, ...], sharding: Sharding) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(_mesh_of(devices, sharding.mesh), PartitionSpec(*sharding.spec))


def _assemble(shape: tuple[int, ...], named: Any, shards: Sequence[Any]) -> Buffer:
    """The array of which these are the shards, one on each device in the mesh's order."""
    import jax

    with jax.enable_x64(True):
        return jax.make_array_from_single_device_arrays(shape, named, list(shards))
