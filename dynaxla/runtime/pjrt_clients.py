"""PJRT clients and their buffers."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dynaxla.cache.environment_key import host, threads
from dynaxla.errors import CompileError, DynaxlaError, ExecutionError, ForkError
from dynaxla.isolation.failures import KnownFailures, failures_file
from dynaxla.isolation.forking import LOADING, hold_across_forks, keep_alive, notify_after_fork
from dynaxla.isolation.once import once
from dynaxla.options import Limits
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.compile_worker import CompileWorker
from dynaxla.runtime.joint_programs import JointExecutable, Peers, add_header, describe_module, split_header
from dynaxla.runtime.loaded_executables import MmapLimit, PjrtExecutable, SynchronousExecutable, compress_executable
from dynaxla.runtime.peer_watch import JointProgram
from dynaxla.runtime.process_set import ProcessSet
from dynaxla.torch_api.storages import data_address, from_capsule, to_capsule

CORES_PER_COMPILE = 2
"""XLA's CPU compiler splits a program into modules that LLVM compiles in parallel; more than two rarely run at a time."""

MAX_COMPILERS = 4
"""The maximum number of compiling child processes; each takes some 250 MB."""


class PjrtClient:
    """A PJRT client and one of its devices. Buffers cross by DLPack, without a copy where alignment allows.

    A CPU buffer shares the memory of a tensor whose data is 64-byte aligned; PJRT copies other tensors.

    Attributes:
        platform: JAX's name of the platform that programs are lowered for. It does not tell where buffers are: a plugin that
            computes on the host's processor calls its platform "cpu", too.
        shares_host_memory: whether its buffers are in host memory, so that a torch CPU tensor converts to a buffer and back
            without a copy. Else data is copied both ways.
        mesh_devices: by which programs are sharded, see `mesh_devices.MeshDevices`; None: they are not.
        peers: the processes that programs run with; None: this one is alone.
        executable_class: of programs that no other process runs.
    """

    shares_host_memory = False
    mesh_devices: Any = None
    peers: Peers | None = None
    executable_class: type[PjrtExecutable] = PjrtExecutable

    def __init__(self, client: Any, device: Any, platform: str) -> None:
        self.platform = platform
        self._client = client
        self._device = device
        self._lost = False
        jaxlib = xla.load()
        self._error = jaxlib.Error
        self._import = jaxlib.to_buffer
        self._export = jaxlib.to_capsule
        notify_after_fork(self)

    @property
    def device(self) -> Any:
        """PJRT's device.

        Raises:
            ForkError: the device belongs to the parent process.
        """
        if self._lost:
            raise ForkError(self.platform)
        return self._device

    def list_devices(self, partitions: int | None = None) -> Sequence[Any]:
        """PJRT's devices of a program: this client's one, or the first ones of the process; for None all that there are, those
        of joined processes included."""
        if partitions == 1:
            return (self.device,)
        if partitions is None and self.peers is not None:
            return self.peers.devices
        return tuple(self.device.client.local_devices()[:partitions])

    def join(self, processes: ProcessSet) -> None:
        """Has programs run with those of other processes, whose devices PJRT's client knows; each of them calls this.

        Raises:
            DistributedError: it does not know them.
        """
        self.peers = Peers(processes, self.device.client)

    def after_fork(self) -> None:
        keep_alive(self._client)
        self._lost = True

    def read_sharded_by(self, devices: Any) -> None:
        """Has tensors be made of sharded arrays, too, of which PJRT exports one shard as if it were all.

        Args:
            devices: the `mesh_devices.MeshDevices` of this client.
        """
        plain = self._export
        self.mesh_devices = devices
        self._export = lambda buffer, **stream: devices.export(buffer, partial(plain, buffer, **stream))

    def prepare(self) -> None:
        """Does nothing: this compiler starts at once."""

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> PjrtExecutable:
        """Compiles a StableHLO module in this process, as the compiler may need the device for autotuning.

        Args:
            partitions: the number of devices over which the module is partitioned.

        Raises:
            CompileError: XLA's compiler refused the module.
            ForkError: the device belongs to the parent process.
        """
        program = describe_module(module)
        return self._make(program, partial(self._compile_here, program, module, partitions), None)

    def _make(
        self,
        program: JointProgram | None,
        load: Callable[[], Any],
        serialized: Callable[[Any], bytes | None] | None,
    ) -> PjrtExecutable:
        if program is None:
            return self.executable_class(load, serialized)
        if self.peers is None:
            raise CompileError(f"{program.what} is a program of the processes {program.ranks}, which are not joined")
        return JointExecutable(program, self.peers, load, serialized)

    def _devices_of(self, program: JointProgram | None, partitions: int) -> Sequence[Any]:
        if program is None or self.peers is None:
            return self.list_devices(partitions)
        return self.peers.devices_of(program.ranks, partitions)

    def _compile_here(self, program: JointProgram | None, module: bytes, partitions: int) -> Any:
        devices, replicas = self._devices_of(program, partitions), program is not None and partitions == 1
        try:
            return xla.compile_on(self._client, devices, module, xla.compile_options(devices, replicas=replicas))
        except self._error as error:
            raise CompileError(
                explanation=f"XLA's {self.platform} compiler refused the program: {error}",
                hint="set DYNAXLA_DEBUG=dump=DIR,stages=stablehlo and report the module",
            ) from error

    def load(self, serialized: bytes, partitions: int = 1) -> PjrtExecutable:
        """Loads an executable for so many devices that a client of the same identity serialized.

        Raises:
            CompileError: the executable cannot be loaded.
            ForkError: the device belongs to the parent process.
        """
        program, own = split_header(serialized)
        return self._make(program, partial(self._load, program, own, partitions), self._keep(own))

    def _keep(self, serialized: bytes) -> Callable[[Any], bytes | None] | None:
        """What gives a loaded program's bytes; None: PJRT does."""
        return None

    def _load(self, program: JointProgram | None, serialized: bytes, partitions: int) -> Any:
        devices, replicas = self._devices_of(program, partitions), program is not None and partitions == 1
        try:
            return xla.load_on(self.device.client, devices, zlib.decompress(serialized), replicas=replicas)
        except (self._error, zlib.error) as error:
            raise CompileError(f"XLA's {self.platform} client refused a serialized program: {error}") from error

    def identity(self) -> Mapping[str, str]:
        """Everything about the device and its compiler that affects the compiled program, for cache keys."""
        return {
            "platform": self.platform,
            "version": self._client.platform_version,
            "device": self.device.device_kind,
            "fingerprint": xla.fingerprint(self.device),
            "flags": os.environ.get("XLA_FLAGS", ""),
        }

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        return self._import(to_capsule(tensor), self._device, None)

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or bool(buffer.unsafe_buffer_pointer() == data_address(tensor))

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """Returns the buffer as a tensor. On the CPU it waits for the buffer, as an eager reader has no stream to wait on.

        Raises:
            DistributedError: another process is lost or computes something else.
            ExecutionError: the run that made the buffer failed.
        """
        if self.peers is not None:
            self.await_peers(buffer)
        try:
            return from_capsule(self._export(buffer))
        except self._error as error:
            raise self.make_run_error(error) from error

    def make_run_error(self, error: Exception) -> DynaxlaError:
        """The error to raise when a buffer is read whose run failed."""
        own = ExecutionError(explanation=str(error), hint="an asynchronous run failed; its inputs are intact")
        return own if self.peers is None else self.peers.processes.explain(own)

    def await_peers(self, buffer: Buffer, timeout_s: float | None = None) -> None:
        """Waits for the run that computes a buffer where other processes may be needed for it, and hears of them.

        Raises:
            DistributedError: another process is lost or computes something else, or the time is over.
        """
        if self.peers is not None:
            self.peers.processes.wait_for(buffer, timeout_s)

    def wait_for(self, buffer: Buffer, timeout_s: float | None = None) -> None:
        """Waits for the run that computes a buffer; returns at once for a deleted (donated) buffer.

        Raises:
            DistributedError: another process is lost or computes something else, or the time is over.
            ExecutionError: the run failed.
        """
        self.await_peers(buffer, timeout_s)
        if buffer.is_deleted():
            return
        try:
            buffer.block_until_ready()
        except self._error as error:
            raise self.make_run_error(error) from error


class CpuClient(PjrtClient):
    """The embedded CPU client. Its compiler runs in a child process and hands over the finished executable.

    PJRT's client has threads, so a forked child makes a client of its own at first use, and loads each of the parent's
    programs from its bytes at the program's first call.

    Args:
        devices: how many devices the processor is shown as; None: as many as XLA_FLAGS says, else one.

    Attributes:
        worker: compiles.
    """

    shares_host_memory = True
    executable_class: type[PjrtExecutable] = SynchronousExecutable

    def __init__(self, devices: int | None = None, worker: CompileWorker | None = None) -> None:
        self._count = () if devices is None else (devices,)
        client = xla.embedded_cpu(*self._count)
        super().__init__(client, client.devices()[0], "cpu")
        # No fork may happen during a native load, which holds locks of its own.
        self._loading = threading.RLock()
        hold_across_forks(self._loading, depth=LOADING)
        self._mappings = MmapLimit()
        self.worker = worker or CompileWorker(KnownFailures(failures_file("jaxlib")), most=_compilers())

    def prepare(self) -> None:
        self.worker.pool.start()

    @property
    def device(self) -> Any:
        with self._loading:
            if self._lost:
                self._client = xla.embedded_cpu(*self._count)
                self._device = self._client.devices()[0]
                self._import = xla.load().to_buffer
                self._lost = False
            return self._device

    def after_fork(self) -> None:
        if not self._lost:
            super().after_fork()
            xla.embedded_cpu.cache_clear()
            self._import = self._import_after_fork

    def _import_after_fork(self, capsule: Any, parents: Any, stream: Any) -> Buffer:
        device = self.device  # also restores `_import`
        return self._import(capsule, device, stream)

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> PjrtExecutable:
        """Compiles a StableHLO module.

        Args:
            partitions: the number of devices over which the module is partitioned.

        Raises:
            CompileError: XLA's compiler refused the module, crashed, or took too much time or memory.
        """
        serialized = self.worker.compile(module, limits, partitions)
        if serialized is None:
            return super().compile(module, limits, partitions)
        return self.load(add_header(describe_module(module), compress_executable(serialized)), partitions)

    def _keep(self, serialized: bytes) -> Callable[[Any], bytes | None] | None:
        """The bytes stay in memory for forked children; they take a hundredth of the loaded program's memory."""
        return lambda handle: serialized

    def _load(self, program: JointProgram | None, serialized: bytes, partitions: int) -> Any:
        with self._loading:
            self._mappings.check()
            return super()._load(program, serialized, partitions)

    def identity(self) -> Mapping[str, str]:
        """The base identity with the processor and the number of threads that XLA may use."""
        return {**host(), **super().identity(), "threads": str(threads())}

    def _compile_here(self, program: JointProgram | None, module: bytes, partitions: int) -> Any:
        with self._loading:
            self._mappings.check()
            return super()._compile_here(program, module, partitions)


class HostTransferClient(PjrtClient):
    """A device with its own memory (a live TPU): torch tensors are on the host and are copied both ways."""

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        # Cloned first: the transfer reads host memory after this call returns, when torch may already write to the tensor.
        return xla.copy_to_device(cpu_client().to_buffer(tensor.clone()), self.device)

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        return False

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """Waits for the buffer and returns a host copy of it.

        Raises:
            ExecutionError: the run that made the buffer failed.
        """
        self.await_peers(buffer)
        host = cpu_client()
        try:
            return host.to_tensor(xla.copy_to_device(buffer, host.device))
        except self._error as error:
            raise self.make_run_error(error) from error


class CudaClient(HostTransferClient):
    """JAX's CUDA plugin for torch's CUDA tensors, whose memory buffers share. Runs are ordered with torch's current stream by
    events, never by waiting on the host. A tensor of the host, which a graph on a GPU may read, is copied.

    Args:
        index: torch's number of the GPU.
    """

    ALIGNMENT_BYTES = 16
    """XLA's programs for GPUs take no argument whose address is not a multiple of this."""

    LEGACY_STREAM = 1
    """CUDA's own handle of the default stream, whose handle in torch is 0, which would stand for no stream here."""

    def __init__(self, client: Any, device: Any, index: int) -> None:
        super().__init__(client, device, "cuda")
        self._index = index

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        if not (tensor.is_cuda and tensor.numel()):  # what has no elements has no address
            return super().to_buffer(tensor.cpu())
        if data_address(tensor) % self.ALIGNMENT_BYTES:
            tensor = tensor.clone()
        stream = self.device.get_stream_for_external_ready_events()
        written = torch.cuda.current_stream(self._index).record_event()
        torch.cuda.ExternalStream(stream, device=self._index).wait_event(written)
        return self._import(to_capsule(tensor), self._device, stream)

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        return PjrtClient.shares_memory(self, buffer, tensor)

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """Returns the buffer as a tensor at once; torch's current stream waits for the run that computes it.

        Raises:
            ExecutionError: the run that made the buffer failed.
        """
        if 0 in buffer.shape:  # torch asks CUDA whose memory an address is
            return torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype.name), device=f"cuda:{self._index}")
        self.await_peers(buffer)
        stream = torch.cuda.current_stream(self._index).cuda_stream
        try:
            return from_capsule(self._export(buffer, stream=stream or self.LEGACY_STREAM))
        except self._error as error:
            raise self.make_run_error(error) from error


def _compilers() -> int:
    """The number of programs compiled in parallel."""
    return min(MAX_COMPILERS, max(1, threads() // CORES_PER_COMPILE))


@once
def cpu_client() -> CpuClient:
    """The process's CPU client."""
    return CpuClient()


@once
def many_cpus(devices: int) -> CpuClient:
    """A client that shows the processor as several devices."""
    return CpuClient(devices)
