"""PJRT clients, their buffers and executables."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from dynaxla.errors import CompileError, ExecutionError, ForkError, TargetError
from dynaxla.failures import KnownFailures, failures_file
from dynaxla.forking import LOADING, follow, hold, keep_for_ever, new_lock
from dynaxla.options import Limits
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer, Client, MemoryUse
from dynaxla.runtime.compiler import CompileWorker
from dynaxla.torch_api.storages import data_address, from_capsule, to_capsule


class PjrtCompiled:
    """A PJRT executable, loaded or not: what can be asked of it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def hlo_text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._handle.hlo_modules())

    def memory_use(self) -> MemoryUse:
        stats = self._handle.get_compiled_memory_stats()
        return MemoryUse(
            arguments_bytes=stats.argument_size_in_bytes,
            outputs_bytes=stats.output_size_in_bytes,
            temporaries_bytes=stats.temp_size_in_bytes,
            code_bytes=stats.generated_code_size_in_bytes,
        )

    def cost(self) -> dict[str, float]:
        """XLA's cost analysis: "flops", "bytes accessed" and more. Empty where the platform has none."""
        found = self._handle.cost_analysis()
        return dict(found[0] if isinstance(found, list) else found) if found else {}


class PjrtExecutable(PjrtCompiled):
    """A PJRT executable loaded on one device.

    Args:
        load: gives the handle; called again in a forked child that runs the program, as the parent's handle belongs to
            the parent's client.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__(load())
        self._load = load
        self._execute = self._handle.execute_sharded
        self._error = xla.load().Error
        self._lock = new_lock()
        follow(self)

    def after_fork(self) -> None:
        self._execute = self._execute_anew

    def _execute_anew(self, arguments: Sequence[Buffer]) -> Any:
        with self._lock:
            if self._execute == self._execute_anew:
                self._handle = self._load()
                self._execute = self._handle.execute_sharded
        return self._execute(arguments)

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program.

        Raises:
            ExecutionError: PJRT refused the arguments or the run failed at once; a run that fails later raises when
                an output is read.
        """
        try:
            outputs = self._execute(arguments).disassemble_into_single_device_arrays()
        except self._error as error:
            raise ExecutionError(
                explanation=str(error), hint="set DYNAXLA_DEBUG=dump=DIR and look at the HLO"
            ) from error
        return [shards[0] for shards in outputs]


class PjrtClient:
    """A PJRT client and one of its devices. Buffers cross by DLPack, without a copy where alignment allows.

    A CPU buffer shares the memory of a tensor whose data is 64-byte aligned; PJRT copies any other.
    """

    zero_copy = True

    def __init__(self, client: Any, device: Any, platform: str) -> None:
        self.platform = platform
        self._client = client
        self._device = device
        self._lost = False
        jaxlib = xla.load()
        self._error = jaxlib.Error
        self._import = jaxlib.to_buffer
        self._export = jaxlib.to_capsule
        follow(self)

    @property
    def device(self) -> Any:
        """PJRT's device.

        Raises:
            ForkError: it is the parent's.
        """
        if self._lost:
            raise ForkError(self.platform)
        return self._device

    def after_fork(self) -> None:
        keep_for_ever(self._client)
        self._lost = True

    def compile(self, bytecode: bytes, limits: Limits) -> PjrtExecutable:
        """Compiles a pure StableHLO module, in this process: the compiler may need the device to try kernels on.

        Raises:
            CompileError: XLA's compiler refused it.
            ForkError: the device is the parent's.
        """
        return PjrtExecutable(partial(self._compile_here, bytecode))

    def _compile_here(self, bytecode: bytes) -> Any:
        try:
            return xla.compile_on(self._client, self.device, bytecode)
        except self._error as error:
            raise CompileError(
                explanation=f"XLA's {self.platform} compiler refused the program: {error}",
                hint="set DYNAXLA_DEBUG=dump=DIR,stages=stablehlo and report the module",
            ) from error

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        return self._import(to_capsule(tensor), self._device, None)

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or bool(buffer.unsafe_buffer_pointer() == data_address(tensor))

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """Waits for the buffer on the CPU: an eager reader has no stream to wait on.

        Raises:
            ExecutionError: the run that made the buffer failed.
        """
        try:
            return from_capsule(self._export(buffer))
        except self._error as error:
            raise ExecutionError(
                explanation=str(error), hint="an asynchronous run failed; its inputs are intact"
            ) from error


class CpuClient(PjrtClient):
    """The embedded CPU client. Its compiler runs in a child process and hands over the finished executable.

    PJRT's client has threads, so a forked child makes one of its own when it first needs it, and loads the programs of
    the parent's on it as they are called, from their bytes.
    """

    def __init__(self) -> None:
        client = xla.embedded_cpu()
        super().__init__(client, client.devices()[0], "cpu")
        # What is native and holds locks of its own: no fork comes between.
        self._loading = threading.RLock()
        hold(self._loading, depth=LOADING)
        self._worker = CompileWorker(KnownFailures(failures_file("jaxlib")))
        self._worker.child.start()

    @property
    def device(self) -> Any:
        with self._loading:
            if self._lost:
                self._client = xla.embedded_cpu()
                self._device = self._client.devices()[0]
                self._import = xla.load().to_buffer
                self._lost = False
            return self._device

    def after_fork(self) -> None:
        if not self._lost:
            super().after_fork()
            xla.embedded_cpu.cache_clear()
            self._import = self._import_anew

    def _import_anew(self, capsule: Any, parents: Any, stream: Any) -> Buffer:
        device = self.device  # puts back what imports
        return self._import(capsule, device, stream)

    def compile(self, bytecode: bytes, limits: Limits) -> PjrtExecutable:
        """Compiles a pure StableHLO module.

        Raises:
            CompileError: XLA's compiler refused it, died of it, took too long or too much memory.
        """
        serialized = self._worker.compile(bytecode, limits)
        if serialized is None:
            return super().compile(bytecode, limits)
        # Kept for forked children, in a hundredth of the memory that the loaded program takes.
        return PjrtExecutable(partial(self._load, zlib.compress(serialized, level=1)))

    def _load(self, compressed: bytes) -> Any:
        with self._loading:
            return xla.load_on(self.device.client, self.device, zlib.decompress(compressed))

    def _compile_here(self, bytecode: bytes) -> Any:
        with self._loading:
            return super()._compile_here(bytecode)


class CudaClient(PjrtClient):
    """JAX's CUDA plugin. Runs are ordered with torch's current stream by events, never by waiting on the host."""

    def __init__(self, client: Any, device: Any) -> None:
        super().__init__(client, device, "cuda")

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        stream = self.device.get_stream_for_external_ready_events()
        return self._import(tensor.detach().__dlpack__(stream=stream), self._device, stream)

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        try:
            return from_capsule(self._export(buffer, stream=stream or None))
        except self._error as error:
            raise ExecutionError(
                explanation=str(error), hint="an asynchronous run failed; its inputs are intact"
            ) from error


class HostTransferClient(PjrtClient):
    """A device with its own memory (a live TPU): torch tensors live on the host and are copied both ways."""

    zero_copy = False

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        import jax

        host = cpu_client()
        # A copy first: the transfer reads the host memory after this call returns, and torch may write to it by then.
        return jax.device_put(host.to_buffer(tensor.clone()), self.device)

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        return False

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        import jax

        host = cpu_client()
        return host.to_tensor(jax.device_put(buffer, host.device))


class PjrtTopology:
    """The compiler of a TPU topology, without the chips."""

    def __init__(self, name: str) -> None:
        self.platform = "tpu"
        self._topology = _tpu_topology(name)

    def compile_only(self, bytecode: bytes) -> PjrtCompiled:
        """Compiles with the real TPU compiler.

        Raises:
            CompileError: the TPU compiler refused the program, for instance because it does not fit the HBM.
        """
        try:
            handle = xla.compile_ahead(self._topology.devices[0], bytecode)
        except xla.load().Error as error:
            raise CompileError(
                explanation=f"the TPU compiler refused the program: {error}",
                hint="read the reason in XLA's words above",
            ) from error
        return PjrtCompiled(handle)


@cache
def cpu_client() -> CpuClient:
    """The process's CPU client."""
    return CpuClient()


@cache
def cuda_client(index: int) -> CudaClient:
    """JAX's CUDA client on device `index`.

    Raises:
        TargetError: the CUDA plugin is not installed, or there is no such device.
    """
    # torch owns the memory of this process's GPU; JAX's default would take three quarters of it at start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = _jax_device("cuda", index)
    return CudaClient(device.client, device)


@cache
def tpu_client(index: int) -> HostTransferClient:
    """The live TPU `index` of this host.

    Raises:
        TargetError: libtpu is not installed or finds no chip.
    """
    device = _jax_device("tpu", index)
    return HostTransferClient(device.client, device, "tpu")


def client_for(device: torch.device) -> Client:
    """The client that computes on a torch device."""
    if device.type == "cpu":
        return cpu_client()
    if device.type == "cuda":
        return cuda_client(device.index or 0)
    raise TargetError(
        explanation=f"there is no PJRT client for tensors on {device}",
        hint="put the tensors on the cpu or on cuda, or set options={'target': ...}",
    )


def client_named(name: str) -> Client:
    """The client of a live target: "cpu", "cuda", "cuda:1", "tpu", "tpu:0".

    Raises:
        TargetError: no such target, or not here.
    """
    platform, _, index = name.partition(":")
    makers: dict[str, Callable[[int], Client]] = {"cpu": lambda _: cpu_client(), "cuda": cuda_client, "tpu": tpu_client}
    if platform not in makers or not (index == "" or index.isdecimal()):
        raise TargetError(
            explanation=f"there is no live target {name!r}",
            hint="live targets: cpu, cuda, cuda:1, tpu; a topology such as tpu:v5e:1x1 is for python -m dynaxla compile",
        )
    return makers[platform](int(index or 0))


def _jax_device(platform: str, index: int) -> Any:
    import jax

    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        extra = {"cuda": "cuda12 or cuda13", "tpu": "tpu"}[platform]
        raise TargetError(
            explanation=f"JAX has no {platform} devices here: {error}", hint=f"install the {extra} extra of dynaxla"
        ) from error
    if index >= len(devices):
        raise TargetError(explanation=f"there is no {platform}:{index}", hint=f"devices here: {len(devices)}")
    return devices[index]


def _tpu_topology(name: str) -> Any:
    """`name` is "v5e:1x1" and the like. libtpu reads its environment when it loads, so it is set before."""
    import importlib.util

    if importlib.util.find_spec("libtpu") is None:
        raise TargetError(explanation="compiling for a TPU needs libtpu", hint="install the tpu extra: dynaxla[tpu]")
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no chip, so two processes do not disturb each other
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except xla.load().Error as error:
        raise TargetError(
            explanation=f"libtpu knows no topology {name!r}: {error}",
            hint="examples: v4:2x2x1, v5e:1x1, v5e:2x2, v5p:2x2x1, v6e:2x2",
        ) from error
