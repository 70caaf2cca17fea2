"""The devices of a client as meshes use them: arrays with one shard on each, put there and read back.

Where the mesh is that of several processes, each has the shards of its own devices. What a process puts on the whole mesh is
compared with what the others put there, by checksums that they tell each other beside their runs.

A sharded array is a JAX array with a `NamedSharding`, of which there is one object for each value: a program tells the
shardings of its arguments apart by the identity of these objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.errors import ShardingError
from dynaxla.mesh import Mesh, Sharding, replicate
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.joint_programs import JointExecutable
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import buffer_spec, upload_readonly
from dynaxla.torch_api.storages import to_capsule
from dynaxla.types import TensorSpec

MOST_SHARDINGS = 4096

Offsets = tuple[int, ...]
"""Where a part of an array begins."""


class MeshDevices:
    """The devices of a client.

    Args:
        client: the client of one of them, whose buffers other tensors have.

    Attributes:
        in_use: whether a mesh was made: programs are then compiled when their arguments are known.
        moves_by_program: whether a program brings what is sharded to another sharding; else the host does, whose memory it is.
        reshard_by: gives a sharded buffer's values another sharding over its mesh, by a program of all its processes.
        on_replicated: is told of buffers that were replicated onto a mesh: by the identity of a buffer, what it is now.
        find_sharding: says how a tensor is sharded.
        programs: over meshes, each with what it computes, and whether it is a part of a compiled graph.
        gathered: by parameter, the axis over which it is split and along which a compiled graph gathers it before its use.
    """

    def __init__(self, client: PjrtClient) -> None:
        from jax.sharding import NamedSharding

        self._client = client
        self._kind = NamedSharding
        self._replicas: dict[int, tuple[ref[Any], Buffer, int]] = {}
        self.in_use = False
        self.moves_by_program = not client.shares_host_memory
        self.reshard_by: Callable[[Buffer, Sharding], Buffer] = lambda buffer, sharding: buffer
        self.on_replicated: Callable[[Mapping[int, Buffer]], None] = lambda replaced: None
        self.find_sharding: Callable[[torch.Tensor], Sharding | None] = lambda tensor: None
        self.gathered = WeakIdKeyDictionary()
        self.programs: WeakKeyDictionary[PjrtExecutable, tuple[str, bool]] = WeakKeyDictionary()

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(self._client.list_devices())

    def make_mesh(self, shape: tuple[int, ...], axes: tuple[str, ...], local: bool) -> Mesh:
        """A mesh of the first devices of all processes, or of this one's.

        Raises:
            ShardingError: there are fewer devices, or this process has none of the mesh.
        """
        mesh, peers = Mesh(shape, axes), self._client.peers
        is_local = peers is not None and (local or peers.ranks_of(self.devices[: mesh.size]) == (peers.processes.rank,))
        mesh = replace(mesh, is_local=is_local)
        devices = self.devices_of(mesh)
        if mesh.size > len(devices):
            where = f"in this process of {len(self.devices)} in all" if is_local else "here"
            raise ShardingError(
                f"the mesh {mesh} has {mesh.size} devices, and there are {len(devices)} {where}",
                "on the CPU: dynaxla.use('cpu', devices=8) where the program begins",
            )
        if peers is not None and peers.processes.rank not in peers.ranks_of(devices):
            raise ShardingError(
                f"the mesh {mesh} has no device of process {peers.processes.rank}",
                f"make it of more of the {len(self.devices)} devices, or of this process's: local=True",
            )
        self.in_use = True
        return mesh

    def devices_of(self, mesh: Mesh) -> tuple[Any, ...]:
        """The devices of a mesh, row-major."""
        found = self.devices
        if mesh.is_local:
            own = self._client.device.process_index
            found = tuple(device for device in found if device.process_index == own)
        return found[: mesh.size]

    def ranks_of(self, mesh: Mesh) -> tuple[int, ...]:
        """The processes that have a mesh, if they are several."""
        peers = self._client.peers
        return () if peers is None or mesh.is_local else peers.ranks_of(self.devices_of(mesh))

    def to_named(self, sharding: Sharding) -> Any:
        """JAX's sharding: one object for each value."""
        return _named(self.devices_of(sharding.mesh), sharding)

    # Arrays

    def put(self, host: torch.Tensor, sharding: Sharding) -> Buffer:
        """A sharded array of a host tensor, which it copies: the same one in all processes of the mesh."""
        if self.ranks_of(sharding.mesh):
            self.note_value(sharding.mesh, checksum(host))
        return self._put(host, sharding, tuple(host.shape), 0)

    def put_rows(self, host: torch.Tensor, sharding: Sharding) -> tuple[Buffer, int | None]:
        """A sharded array of the rows that each process has of it, one process's after the other's, copied.

        Args:
            sharding: splits no dim but the first one.

        Returns:
            The array; and, if all processes give the same rows, their checksum for `note_value`.

        Raises:
            ShardingError: an axis does not divide the rows, or a process's part of the mesh is none of the rows.
        """
        if not host.dim():
            return self._put(host, sharding, (), 0), checksum(host)
        first, count, parts = self._rows_of(sharding)
        rows = host.shape[0]
        if rows % count:
            raise ShardingError(
                f"dim 0 of a batch has size {rows} in this process, which its {count} parts of {sharding} do not divide",
                "use drop_last=True, or another batch size",
            )
        shape = (rows // count * parts, *host.shape[1:])
        buffer = self._put(host, sharding, shape, first * (rows // count))
        return buffer, checksum(host) if self.ranks_of(sharding.mesh) and count == parts else None

    def _rows_of(self, sharding: Sharding) -> tuple[int, int, int]:
        """Of the parts into which dim 0 is split this process's first one, how many it has, and how many there are."""
        parts = sharding.mesh.count(sharding.dims[0])
        named = self.to_named(Sharding(sharding.mesh, sharding.dims[:1]))
        owned: dict[int, set[int]] = {}
        for device, (place,) in named.devices_indices_map((parts,)).items():
            owned.setdefault(device.process_index, set()).add(place.start or 0)
        own = owned[self._client.device.process_index]
        is_even = all(max(each) - min(each) + 1 == len(each) == len(own) for each in owned.values())
        if not is_even or len(own) * len(set(map(frozenset, owned.values()))) != parts:
            raise ShardingError(
                f"the processes' devices have uneven parts of {sharding}", "split batches over the mesh's first axis"
            )
        return min(own), len(own), parts

    def _put(self, host: torch.Tensor, sharding: Sharding, shape: tuple[int, ...], first: int) -> Buffer:
        """
        Args:
            shape: of the array.
            first: the row of the array that is the host tensor's first one.
        """
        named = self.to_named(sharding)
        parts: dict[Any, Any] = {}
        shards = []
        for device, place in named.addressable_devices_indices_map(shape).items():
            key = str(place)
            if key not in parts:
                if shape != host.shape:
                    start, stop, _ = place[0].indices(shape[0])
                    place = slice(start - first, stop - first), *place[1:]
                parts[key] = host[place].clone(memory_format=torch.contiguous_format)
            shards.append(self._put_on(parts[key], device))
        return _assemble(shape, named, shards)

    def note_value(self, mesh: Mesh, checksum: int) -> None:
        """Has the processes of a mesh compare a value that each of them gives, in the order of these calls."""
        assert self._client.peers is not None
        self._client.peers.watch.note_value(self.ranks_of(mesh), checksum)

    def own_offsets(self, shape: tuple[int, ...], sharding: Sharding) -> list[Offsets]:
        """Where the parts begin that this process's devices have of an array, each once."""
        places = self.to_named(sharding).addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(map(_begin, places)))

    def read_part(self, buffer: Buffer, offsets: Offsets) -> torch.Tensor:
        """The part of a sharded array that begins there, on the host; this process's devices have it."""
        found = next(shard for shard in buffer.addressable_shards if _begin(shard.index) == offsets)
        return self._client.to_tensor(found.data)

    def put_parts(self, shape: tuple[int, ...], sharding: Sharding, parts: Mapping[Offsets, torch.Tensor]) -> Buffer:
        """A sharded array of the parts that this process's devices have, from memory that nothing else writes."""
        named = self.to_named(sharding)
        places = named.addressable_devices_indices_map(shape)
        return _assemble(shape, named, [self._put_on(parts[_begin(at)], device) for device, at in places.items()])

    def put_zeros(self, spec: TensorSpec, sharding: Sharding) -> Buffer:
        """A sharded array of zeros, made of one shard of the host's."""
        tile = torch.zeros(sharding.tile(spec.shape), dtype=spec.dtype, device="cpu")
        named = self.to_named(sharding)
        return _assemble(spec.shape, named, [self._put_on(tile, device) for device in named.addressable_devices])

    def _put_on(self, host: torch.Tensor, device: Any) -> Buffer:
        with xla.load().TracebackScope():
            if self._client.shares_host_memory:
                return xla.load().to_buffer(to_capsule(host), device, None)
            return xla.copy_to_device(upload_readonly(self._client, host), device)

    def read(self, buffer: Buffer) -> torch.Tensor:
        """A sharded array's values on the host, in memory of their own. Of what other processes have a program of all of them
        gathers it here."""
        spec, sharding = buffer_spec(buffer), sharding_of(buffer)
        assert sharding is not None
        parts = {str(shard.index): shard for shard in buffer.addressable_shards}
        if len(parts) < sharding.parts:
            return self.read(self.reshard_by(buffer, replicate(sharding.mesh, len(spec.shape))))
        made = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        for shard in parts.values():
            made[shard.index] = self._client.to_tensor(shard.data)
        return made

    def is_on_mesh(self, buffer: Buffer) -> bool:
        """Whether a buffer is an array over a mesh."""
        return type(buffer.sharding) is self._kind

    def export(self, buffer: Buffer, export_plain: Callable[[], Any]) -> Any:
        """The DLPack capsule of a buffer; of a sharded one that of its values on the host."""
        return to_capsule(self.read(buffer)) if self.is_on_mesh(buffer) else export_plain()

    def reshard(self, buffer: Buffer, sharding: Sharding) -> Buffer:
        """The same values, sharded so. They go through the host, unless they are only copied to each device."""
        if sharding_of(buffer) == sharding:
            return buffer
        given = sharding_of(buffer)
        if given is not None and given.mesh == sharding.mesh and (self.moves_by_program or self.ranks_of(given.mesh)):
            return self.reshard_by(buffer, sharding)
        if given is not None:
            return self.put(self.read(buffer), sharding)
        if sharding.is_replicated and not (self._client.shares_host_memory or self.ranks_of(sharding.mesh)):
            devices = self.devices_of(sharding.mesh)
            copies = [xla.copy_to_device(buffer, device) for device in devices]
            return _assemble(buffer.shape, self.to_named(sharding), copies)
        return self.put(self._client.to_tensor(buffer), sharding)

    def replicate(self, buffer: Buffer, mesh: Mesh) -> Buffer:
        """The whole of a device's buffer on every device of a mesh, once for each buffer."""
        is_joint, whole = bool(self.ranks_of(mesh)), replicate(mesh, len(buffer.shape))
        known = self._replicas.get(id(buffer))
        if known is not None and known[0]() is buffer and sharding_of(known[1]) == whole:
            made, told = known[1:]
        else:
            host = self._client.to_tensor(buffer) if is_joint else None
            made = self.reshard(buffer, whole) if host is None else self._put(host, whole, tuple(host.shape), 0)
            place, told = id(buffer), 0 if host is None else checksum(host)
            self._replicas[place] = ref(buffer, lambda _: self._replicas.pop(place, None)), made, told
        if is_joint:
            self.note_value(mesh, told)
        return made

    # Programs

    def key_of(self, buffers: Sequence[Buffer]) -> tuple[int, ...]:
        """What tells apart how buffers are sharded; zeros where none is."""
        kind = self._kind
        return tuple([id(s) if type(s := buffer.sharding) is kind else 0 for buffer in buffers])

    def set_results(self, executable: PjrtExecutable, specs: Sequence[TensorSpec], mesh: Mesh) -> list[int]:
        """Has an executable give sharded arrays; returns which of its results have shardings that no spec describes."""
        named = _mesh_of(self.devices_of(mesh), mesh)
        work = [_WORK] if isinstance(executable, JointExecutable) else []
        specs = [*specs, *work]
        found: list[Sharding | None] = []
        for spec, axes in zip(specs, xla.read_output_axes(executable.handle, named, len(specs)), strict=True):
            dims = None if axes is None else axes + ((),) * (len(spec.shape) - len(axes))
            sharding = None if dims is None else Sharding(mesh, dims)
            found.append(sharding if sharding is not None and sharding.divides(spec.shape) else None)
        if None not in found:
            made = zip(specs, found, strict=True)
            executable.set_result_handlers([xla.global_handler(s.shape, s.dtype, self.to_named(o)) for s, o in made])  # type: ignore[arg-type]
        return [i for i, sharding in enumerate(found) if sharding is None]


def _begin(place: tuple[slice, ...]) -> Offsets:
    return tuple(each.start or 0 for each in place)


_WORK = TensorSpec((), torch.uint32)
"""The last result of a program of several processes, see `JointExecutable`."""


def checksum(host: torch.Tensor) -> int:
    """Of the bytes of a host tensor, its dtype and its shape."""
    head = repr((host.dtype, tuple(host.shape))).encode()
    flat = host.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"", zlib.crc32(head))


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
    client = named.mesh.devices.flat[0].client
    is_local = named.is_fully_addressable and client.device_count() > client.local_device_count()
    return Sharding(Mesh(tuple(named.mesh.devices.shape), tuple(named.mesh.axis_names), is_local), dims)


@cache
def _mesh_of(devices: tuple[Any, ...], mesh: Mesh) -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices).reshape(mesh.shape), mesh.axes)


@cache
def _named(devices: tuple[Any, ...], sharding: Sharding) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(_mesh_of(devices, sharding.mesh), PartitionSpec(*sharding.spec))


def _assemble(shape: tuple[int, ...], named: Any, shards: Sequence[Any]) -> Buffer:
    """The array of which these are the shards, one on each device in the mesh's order."""
    import jax

    with jax.enable_x64(True):
        return jax.make_array_from_single_device_arrays(shape, named, list(shards))
