"""`dynaxla.make_mesh`, `shard` and what belongs to them: tensors of the device over a mesh of the client's devices."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dynaxla.device.mesh_checkpoints import locate_whole
from dynaxla.device.registration import RegisteredDevice, device_in_use, use
from dynaxla.device.storage import DeviceStorage, find_sharding, storage_of
from dynaxla.device.view_layout import memory_order
from dynaxla.errors import ShardingError
from dynaxla.fx.permutations import invert_permutation
from dynaxla.mesh import Mesh, Sharding, Spec, parse_dims, parse_sharding, replicate
from dynaxla.ops.dtypes import STORED
from dynaxla.runtime.mesh_devices import MeshDevices
from dynaxla.runtime.transfers import buffer_spec
from dynaxla.torch_api.modules import move_tensors
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.types import DEVICE_TYPE, TensorSpec

Module = TypeVar("Module", bound=nn.Module)
Plan = Mapping[str, Spec | str]


def make_mesh(shape: Sequence[int], axes: Sequence[str], *, local: bool = False) -> Mesh:
    """Makes a mesh of the first devices of the client of `torch.device("dynaxla")`, row-major. After
    `dynaxla.distributed.initialize` these are the devices of all processes, one process's after the other's.

    From then on, each program of the device is compiled for the shardings of its arguments.

    Args:
        shape: the devices along each axis: (2, 4).
        axes: the names of the axes: ("data", "model").
        local: whether the devices are this process's alone.

    Raises:
        ShardingError: there are fewer devices, or this process has none of them, or an axis has no size or name of its own.
    """
    use()
    devices: MeshDevices | None = device_in_use().client.mesh_devices
    if devices is not None:
        return devices.make_mesh(tuple(shape), tuple(axes), local)
    mesh = Mesh(tuple(shape), tuple(axes))
    if mesh.size > 1:
        hint = "on the CPU: dynaxla.use('cpu', devices=8) where the program begins; else name no device number in dynaxla.use"
        raise ShardingError(f"the mesh {mesh} has {mesh.size} devices, and the process uses one", hint)
    return mesh


@overload
def shard(value: Tensor, mesh: Mesh, spec: Spec) -> Tensor: ...
@overload
def shard(value: Module, mesh: Mesh, spec: Plan, *, axis: str | None = None) -> Module: ...
def shard(value: Any, mesh: Mesh, spec: Any, *, axis: str | None = None) -> Any:
    """Shards a tensor, or the parameters and buffers of a module, over a mesh.

    Args:
        value: a tensor of the device, which is sharded in place; one of the host, of which it makes a copy on the devices;
            or a module, which comes to the device.
        mesh: as `make_mesh` made it.
        spec: of a tensor: for each dim the axis or axes over which it is split, or None; dims left out are not split. Of a
            module: specs by patterns of the names of parameters and buffers ("*.weight", or a regular expression that matches
            the whole name); the first that matches counts, and what none matches is on every device. A style of transformers'
            plans ("colwise", "rowwise" ...) may stand in the place of a spec, for the name of a module: `shard(model, mesh,
            model.tp_plan)`.
        axis: of the mesh, over which styles split; by default its last one.

    Returns:
        The tensor or the module.

    Raises:
        ShardingError: a spec does not fit a tensor, an axis does not divide a dim, or a pattern matches nothing.
    """
    if isinstance(value, nn.Module):
        plan = ShardingPlan(mesh, spec, axis or mesh.axes[-1], set())
        made = _shard_module(value, mesh, plan.choose)
        plan.check(value)
        return made
    return place(value, parse_sharding(mesh, spec, value.shape))


def fully_shard(module: Module, mesh: Mesh, axis: str) -> Module:
    """Shards each parameter of a module over an axis, along its largest dim that the axis divides; buffers, and parameters
    without such a dim, are on every device. What `shard` split over other axes before stays so.

    A compiled model gathers a parameter where it is used, in the forward and again in the backward, and its gradient is
    sharded as it is.

    Raises:
        ShardingError: the mesh has no such axis.
    """
    mesh.count((axis,))

    def choose(name: str, tensor: Tensor) -> Sharding:
        known = find_tensor_sharding(tensor)
        kept = known if known is not None and known.mesh == mesh else replicate(mesh, tensor.dim())
        return split_largest(kept, tensor.shape, axis) if isinstance(tensor, nn.Parameter) else kept

    made = _shard_module(module, mesh, choose)
    devices = device_in_use().client.mesh_devices
    for parameter in module.parameters() if devices is not None else ():
        devices.gathered[parameter] = axis
    return made


def split_largest(sharding: Sharding, shape: Sequence[int], axis: str) -> Sharding:
    """The sharding with the largest dim that an axis divides split over it, too; unchanged where there is none, and where a dim
    is split over it already."""
    parts = sharding.mesh.count((axis,))
    kept, dims = sharding.tile(shape), list(sharding.dims)
    free = [dim for dim, size in enumerate(kept) if size and size % parts == 0]
    if not free or parts == 1 or any(axis in axes for axes in dims):
        return sharding
    largest = max(free, key=kept.__getitem__)
    dims[largest] = (*dims[largest], axis)
    return Sharding(sharding.mesh, tuple(dims))


def sharding(tensor: Tensor) -> Sharding | None:
    """How a tensor is sharded: its mesh, and for each dim the axes over which it is split; None if it is on one device.

    `print` it, or read `.spec`.
    """
    return find_tensor_sharding(tensor)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Chooses the shardings of a module's tensors by a plan."""

    mesh: Mesh
    plan: Plan
    axis: str
    matched: set[str]

    def choose(self, name: str, tensor: Tensor) -> Sharding:
        for pattern, spec in self.plan.items():
            if isinstance(spec, str):
                if _matches(pattern, name) or _matches(pattern, name.rpartition(".")[0]):
                    self.matched.add(pattern)
                    return parse_sharding(self.mesh, _spec_of_style(spec, tensor.dim(), self.axis), tensor.shape, name)
            elif _matches(pattern, name):
                self.matched.add(pattern)
                return parse_sharding(self.mesh, spec, tensor.shape, name)
        return replicate(self.mesh, tensor.dim())

    def find_matches(self, names: Sequence[str]) -> set[str]:
        """The patterns that match one of these names."""
        return {pattern for pattern in self.plan if any(_matches(pattern, name) for name in names)}

    def check(self, module: nn.Module) -> None:
        """Raises ShardingError if a pattern matched no tensor and no module."""
        matched = self.matched | self.find_matches([name for name, _ in module.named_modules()])
        for pattern in self.plan:
            if pattern not in matched:
                raise ShardingError(f"{pattern!r} matches no parameter and no module", "see module.named_parameters()")


def _matches(pattern: str, name: str) -> bool:
    if fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


_WHOLE_STYLES = frozenset(
    "replicate replicated_with_grad_allreduce all_reduce sequence_parallel local_params moe_tp_experts moe_identity_expert "
    "mla_kv_a_proj".split()
)
"""Styles of transformers' plans that split no parameter: they say what becomes of values between modules, which XLA finds."""


def _spec_of_style(style: str, rank: int, axis: str) -> Spec:
    """The spec by which one of transformers' styles splits a parameter of this rank."""
    dims: list[str | None] = [None] * rank
    if style.startswith(("colwise", "packed_colwise")):
        dims[max(rank - 2, 0)] = axis
    elif style.startswith(("rowwise", "packed_rowwise")):
        dims[-1] = None if rank == 1 else axis
    elif style.startswith("embedding_"):
        dims[0 if style == "embedding_rowwise" else 1] = axis
    elif style not in _WHOLE_STYLES:
        raise ShardingError(f"the style {style!r} is not known", f"give a spec such as (None, {axis!r}) in its place")
    return dims


def _shard_module(module: Module, mesh: Mesh, choose: Callable[[str, Tensor], Sharding]) -> Module:
    """Brings a module to the mesh: nothing of it, if a spec does not fit."""
    shardings: dict[int, tuple[Tensor, Sharding]] = {}  # by identity: of tensors that stay alive meanwhile
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ShardingError(f"{name} has no shape yet", "run the module once before it is sharded")
        chosen = choose(name, tensor)
        shardings[id(tensor)] = tensor, chosen
        if tensor.grad is not None:
            shardings[id(tensor.grad)] = tensor.grad, chosen

    def move(tensor: Tensor) -> Tensor:
        found = shardings.get(id(tensor))
        return tensor.to(DEVICE_TYPE) if found is None else place(tensor, found[1])

    move_tensors(module, move)
    return module


def place(tensor: Tensor, wanted: Sharding) -> Tensor:
    """Shards a tensor of the device in place; of one of the host gives a sharded copy on the device.

    Raises:
        ShardingError: the tensor is a part of another one's memory, or of a dtype that programs do not have.
    """
    device = device_in_use()
    devices: MeshDevices | None = device.client.mesh_devices
    if devices is None or wanted.mesh.size == 1:
        return tensor.to(DEVICE_TYPE)
    if tensor.dtype not in STORED:
        raise ShardingError(f"a tensor of {tensor.dtype} is not sharded", "programs have no such dtype")
    if tensor.device.type != DEVICE_TYPE:
        return _put(device, devices, tensor, wanted)
    memory, order = locate_whole(device.eager.layouts, tensor)
    buffer = devices.reshard(device.eager.buffer_of(memory), wanted.permute(order))
    memory.rebind(buffer, made_by="dynaxla.shard")
    return tensor


def place_rows(tensor: Tensor, mesh: Mesh, axes: str | tuple[str, ...]) -> tuple[Tensor, int | None]:
    """A sharded copy of a tensor whose first dim is split over these axes; if several processes have the mesh, of the rows that
    each of them gives.

    Returns:
        The copy; and if all processes are to give the same rows, their checksum for `note_values`.

    Raises:
        ShardingError: the axes do not divide the rows.
    """
    device = device_in_use()
    devices: MeshDevices | None = device.client.mesh_devices
    wanted = Sharding(mesh, parse_dims((axes,) if tensor.dim() else (), tensor.dim()))
    if devices is None or not devices.ranks_of(mesh):
        return place(tensor, parse_sharding(mesh, wanted.spec, tensor.shape)), None
    array = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    buffer, checksum = devices.put_rows(array, wanted)
    memory = DeviceStorage(buffer_spec(buffer), buffer)
    memory.made_by = "a batch"
    return device.memories.tensor(memory), checksum


def note_values(mesh: Mesh, checksums: Sequence[int]) -> None:
    """Has the processes of a mesh compare what each of them gave."""
    devices: MeshDevices | None = device_in_use().client.mesh_devices
    for checksum in checksums:
        assert devices is not None
        devices.note_value(mesh, checksum)


def _put(device: RegisteredDevice, devices: MeshDevices, host: Tensor, wanted: Sharding) -> Tensor:
    """A sharded copy of a host tensor, with its strides if these are dense."""
    order = memory_order(host.stride())
    dense = host.detach().permute(order)
    if not dense.is_contiguous():
        order, dense = tuple(range(host.dim())), host.detach().contiguous()
    array = dense.resolve_conj().resolve_neg()
    memory = DeviceStorage(TensorSpec.from_tensor(array), devices.put(array, wanted.permute(order)))
    memory.made_by = "dynaxla.shard"
    spec = TensorSpec.from_tensor(host)
    strides = tuple(host.stride()) if tuple(order) != tuple(range(host.dim())) else None
    made = device.memories.tensor(memory, spec, strides)
    return made.requires_grad_(host.requires_grad) if host.is_leaf else made


def make_zeros(shape: Sequence[int], dtype: torch.dtype, wanted: Sharding) -> Tensor:
    """Zeros over a mesh, of which no device ever has more than its part."""
    device, spec = device_in_use(), TensorSpec(tuple(shape), dtype)
    memory = DeviceStorage(spec, device.client.mesh_devices.put_zeros(spec, wanted))
    memory.made_by = "dynaxla.shard"
    return device.memories.tensor(memory)


def find_tensor_sharding(tensor: Tensor) -> Sharding | None:
    """See `sharding`."""
    memory = get_attached_memory(tensor.untyped_storage()) if tensor.device.type == DEVICE_TYPE else None
    if memory is None:
        return None
    found = find_sharding(memory)
    if found is None:
        return None
    order = memory_order(tensor.stride())
    if memory.spec.shape != tuple(tensor.shape[dim] for dim in order) or tensor.storage_offset():
        tensor = device_in_use().kernels.copies.row_major(tensor.detach())
        return find_sharding(storage_of(tensor))
    return found.permute(invert_permutation(order))
