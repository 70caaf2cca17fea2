"""`dynaxla.use`: makes `torch.device("dynaxla")` a device, once per process."""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dynaxla import device
from dynaxla.custom_ops.process_collectives import PERMUTE_TENSOR
from dynaxla.device.autocast import register_autocast
from dynaxla.device.compiled_graphs import DeviceClient
from dynaxla.device.cpu_fallback import CpuFallbackRunner
from dynaxla.device.device_module import DeviceModule, Generator
from dynaxla.device.dispatcher import OpDispatcher, ShardedOpDispatcher
from dynaxla.device.kernels import DeviceKernels
from dynaxla.device.lazy_mode import LazyMode
from dynaxla.device.mesh_checkpoints import MeshCheckpoints
from dynaxla.device.op_programs import OpProgramBuilder
from dynaxla.device.storage import DeviceStorages, find_sharding
from dynaxla.device.supported_ops import find_supported_ops
from dynaxla.distributed.process_groups import ProcessGroupMaker
from dynaxla.errors import OptionError, TargetError
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.isolation.once import once
from dynaxla.options import Options, check_device_mode
from dynaxla.runtime.joined_client import DeviceCpuClient
from dynaxla.runtime.mesh_devices import MeshDevices
from dynaxla.runtime.pjrt_clients import PjrtClient, many_cpus
from dynaxla.runtime.process_set import joined_processes
from dynaxla.runtime_state import process
from dynaxla.targets.registry import connect, find_target, registered_targets
from dynaxla.torch_api.backward_passes import run_backward_in_caller
from dynaxla.torch_api.c10d import has_process_groups, keep_permutations, keep_used_parameters_on_host, register_backend
from dynaxla.torch_api.dynamo import leave_modules_to_python, leave_streams_to_python, mark_calls_in_profiles_alone
from dynaxla.torch_api.flex import accept_tensors
from dynaxla.torch_api.generators import draw_shards_apart, give_generators
from dynaxla.torch_api.meta_kernels import use_cpu_meta_kernels
from dynaxla.torch_api.module_conversions import keep_parameters, move_states_of_fsdp
from dynaxla.torch_api.private_device import (
    answer_for_accelerator,
    exchange_by_dlpack,
    get_registered_device_type,
    give_storages,
    register_device_type,
    set_printer,
)
from dynaxla.torch_api.sharded_checkpoints import offer_shards
from dynaxla.types import DEVICE_TYPE

PLATFORM_VARIABLE = "DYNAXLA_PLATFORM"
_VENDORS = {"0x1ae0": "tpu", "0x10de": "cuda"}
"""Of devices on the PCI bus: asking JAX for a platform that is not here takes seconds, and prints errors."""


@dataclass(frozen=True, slots=True)
class RegisteredDevice:
    """The device of the process.

    Attributes:
        platform: as `use` was told it: "cpu", "tpu:1".
        client: computes.
        memories: of its tensors.
        eager: runs ops, one by one or collected.
    """

    platform: str
    client: PjrtClient
    memories: DeviceStorages
    eager: OpDispatcher
    kernels: DeviceKernels

    def count_devices(self) -> int:
        """The number of devices of this process that meshes can have."""
        devices = self.client.mesh_devices
        return 1 if devices is None else len(self.client.device.client.local_devices())


@dataclass(slots=True)
class _Choice:
    device: RegisteredDevice | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


@once
def _choice() -> _Choice:
    return _Choice()


def use(platform: str | os.PathLike[str] | None = None, *, devices: int | None = None) -> torch.device:
    """Makes `torch.device("dynaxla")` the device of a platform, for as long as the process lives; nothing the second time.

    Args:
        platform: "tpu", "tpu:1", "cuda", "cpu", or a PJRT plugin's name or file; None: what DYNAXLA_PLATFORM says, else the
            best one that is here: tpu, cuda, cpu.
        devices: of the CPU: as how many devices the processor is shown, for meshes (`dynaxla.make_mesh`); None: as many as
            XLA_FLAGS says, else one. Of other platforms how many there have to be: all are there for meshes if `platform` has
            no number.

    Raises:
        DistributedError: processes have met (`dynaxla.distributed.initialize`), and the platform's client does not join them.
        OptionError: the process uses another platform, another number of devices, or another package's device.
        TargetError: the platform is not here, or has fewer devices.
    """
    choice = _choice()
    with choice.lock, defer_interrupts():
        named = os.environ.get(PLATFORM_VARIABLE) if platform is None else os.fspath(platform)
        if choice.device is None:
            choice.device = _start(named, devices)
        elif named is not None and _full(named) != _full(choice.device.platform):
            hint = "choose it once, where the program begins"
            raise OptionError(f"the process uses {choice.device.platform}, not {named}", hint)
        elif devices is not None and devices != (count := choice.device.count_devices()):
            raise OptionError(f"the process uses {count} devices, not {devices}", "choose where the program begins")
    return torch.device(DEVICE_TYPE)


def device_mode(mode: str) -> DeviceMode:
    """How ops outside of compiled graphs run on the device, from now on, in all threads.

    Args:
        mode: "eager": each by its own program, at once; "fused": they are collected, and run in one program when a value is
            read (docs/device.md).

    Returns:
        A context, at whose end the mode is what it was.

    Raises:
        OptionError: no such mode, the nearest is named; or no device is in use.
    """
    check_device_mode(mode)
    fused = device_in_use().eager.fused
    before = fused.is_on
    fused.switch(mode == "fused")
    return DeviceMode(fused, before)


class DeviceMode:
    """A mode that was set: `with` ends it."""

    def __init__(self, fused: LazyMode, before: bool) -> None:
        self._fused = fused
        self._before = before

    def __enter__(self) -> None:
        """It was set already."""

    def __exit__(self, *error: object) -> None:
        self._fused.switch(self._before)


def device_in_use() -> RegisteredDevice:
    """The device of the process.

    Raises:
        OptionError: `use` was not called.
    """
    device = _choice().device
    if device is None:
        raise OptionError("no device is in use", "call dynaxla.use() first")
    return device


def _full(platform: str) -> str:
    return platform if ":" in platform or platform == "cpu" else f"{platform}:0"


def _start(named: str | None, devices: int | None) -> RegisteredDevice:
    taken = get_registered_device_type()
    if taken is not None:
        hint = "torch has one such device per process"
        raise OptionError(f"the device {taken!r} is in use, of another package", hint)
    platform, client = _connected(named, devices)
    shared, memories, generator = process(), DeviceStorages(), Generator()
    host = CpuFallbackRunner(client, memories, generator.make_host_generator)
    builder = OpProgramBuilder(shared, Options.from_mapping({"fallback": "error"}), find_target(platform), client)
    several = client.mesh_devices is not None
    eager = (ShardedOpDispatcher if several else OpDispatcher)(builder, memories, shared.recorder, host, generator.seed)
    kernels = DeviceKernels(client, memories, eager, host)
    module = DeviceModule(client, memories, generator, eager.force)
    register_device_type(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    kernels.register(find_supported_ops(shared.registered.current))
    register_autocast(kernels.kernels)
    give_storages(kernels.resize_storage)
    exchange_by_dlpack(memories.adopt)
    give_generators(torch.device(DEVICE_TYPE, 0))
    keep_parameters()
    accept_tensors()
    use_cpu_meta_kernels()
    run_backward_in_caller(defer_interrupts)
    leave_streams_to_python(torch.device(DEVICE_TYPE, 0))
    leave_modules_to_python(_untraced_modules())
    mark_calls_in_profiles_alone()
    answer_for_accelerator(module)
    set_printer(lambda tensor: tensor.detach().cpu())
    if several:
        client.mesh_devices.on_replicated = memories.exchange
        client.mesh_devices.find_sharding = lambda tensor: find_sharding(memories.of(tensor))
    on_device = DeviceClient(client, memories, eager, kernels.copies)
    if has_process_groups():
        draw_shards_apart(DEVICE_TYPE)
        move_states_of_fsdp()
        keep_used_parameters_on_host(DEVICE_TYPE)
        keep_permutations(DEVICE_TYPE, PERMUTE_TENSOR)
        register_backend(DEVICE_TYPE, ProcessGroupMaker(on_device).make)
        if several:
            offer_shards(MeshCheckpoints(client.mesh_devices, eager))
    target = find_target(platform)
    registered_targets()[DEVICE_TYPE] = replace(target, client=lambda: on_device)
    return RegisteredDevice(platform, client, memories, eager, kernels)


def _connected(named: str | None, devices: int | None) -> tuple[str, PjrtClient]:
    """The platform and its client: that which is named, or the best that is here.

    Raises:
        TargetError: it is not here, or only to compile for.
    """
    if named is not None:
        return named, _client(named, devices)
    for platform in _likely():
        try:
            connect(find_target(platform))
        except TargetError:
            continue
        return platform, _client(platform, devices)  # with too few devices an error, and not the CPU
    return "cpu", _client("cpu", devices)


def _client(platform: str, devices: int | None) -> PjrtClient:
    """
    Raises:
        TargetError: the platform is not here, or has not so many devices.
    """
    client, processes = connect(find_target(platform)), joined_processes()
    assert isinstance(client, PjrtClient)
    count = 1 if _names_one(platform) else len(client.list_devices())
    if platform == "cpu":
        count = devices or count
        client = (
            DeviceCpuClient() if processes is not None or count == 1 else many_cpus(count)
        )  # the host's keep theirs
    if devices is not None and devices > count:
        raise TargetError(f"{platform} has {count} devices, not {devices}", "name no number of devices, or the CPU")
    if processes is not None:
        client.join(processes, *((count,) if isinstance(client, DeviceCpuClient) else ()))
    if count > 1 or (processes is not None and not _names_one(platform)):
        client.read_sharded_by(MeshDevices(client))
    return client


def _untraced_modules() -> list[str]:
    """What Dynamo is not to trace: that works on buffers, JAX's included. What users ask of `torch.dynaxla` is traced, as
    numbers."""
    of_device = (module.name for module in pkgutil.iter_modules(device.__path__, f"{device.__name__}."))
    return ["dynaxla.runtime", "jax", *(name for name in of_device if name != DeviceModule.__module__)]


def _names_one(platform: str) -> bool:
    """Whether a name is that of one device of its platform."""
    return platform.rpartition(":")[2].isdecimal()


def _likely() -> list[str]:
    """Platforms of which a device is plugged in, the best one first."""
    files = Path("/sys/bus/pci/devices").glob("*/vendor")
    vendors = {path.read_text().strip() for path in files}
    return [platform for vendor, platform in _VENDORS.items() if vendor in vendors]
