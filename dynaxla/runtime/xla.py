"""The wall around jaxlib: the only importer of its internals and of JAX's (jax._src, jax.interpreters, jax.extend).

Clients, buffers and executables of PJRT, and the bindings of MLIR with StableHLO. Free of torch, for the child process that
compiles. All of it is in jax and jaxlib 0.10.2; tests/torch_api/test_jaxlib.py holds each to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dynaxla.isolation.forking import follow, keep_for_ever
from dynaxla.runtime.library_fusions import WITHOUT_REDUCTIONS, keeps_numbers

_LAPACK = "lapack_"
"""With it the names begin of what JAX's lowerings call of LAPACK."""


@dataclass(frozen=True, slots=True)
class Serialized:
    """Attributes:
    executable: serialized for the embedded CPU client; None if XLA compiles the program but cannot serialize it.
    """

    executable: bytes | None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Attributes:
    message: what XLA said.
    """

    message: str


class Jaxlib:
    """jaxlib's bindings of PJRT, loaded.

    Attributes:
        Error: what PJRT and XLA raise.
        to_buffer: from a DLPack capsule, a device and a stream, or None, to a buffer that shares its memory where it can.
        to_capsule: from a buffer to a DLPack capsule; `stream` orders it behind the run that makes the buffer.
        TracebackScope: programs and buffers that this thread makes while it is entered hold the code of no frame outside of
            it. Dynamo drops a compiled function when the code that it made for it dies: a program, its weights or its results
            that held that code where no collector sees it would keep the function through every torch._dynamo.reset().
    """

    def __init__(self) -> None:
        from jaxlib import _jax, xla_client

        self.xla_client: Any = xla_client
        self.jax: Any = _jax
        self.Error: type[Exception] = xla_client.XlaRuntimeError
        self.to_buffer: Any = _jax.dlpack_managed_tensor_to_buffer
        self.to_capsule: Any = _jax.buffer_to_dlpack_managed_tensor
        self.TracebackScope: Any = _jax.TracebackScope


@cache
def load() -> Jaxlib:
    """Imports jaxlib once per process; creates no client and probes no device."""
    return Jaxlib()


class Mlir:
    """jaxlib's bindings of MLIR, loaded, which know StableHLO but nothing of torch.

    Attributes:
        ir, stablehlo: the bindings' modules.
    """

    def __init__(self) -> None:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import chlo, sdy, stablehlo

        self.ir: Any = ir
        self.stablehlo: Any = stablehlo
        self._dialects = (chlo, stablehlo, sdy)
        self.after_fork()  # the parent may have used JAX without this package
        follow(self)

    def after_fork(self) -> None:
        from jax._src.interpreters import mlir

        # Contexts verify modules on JAX's threads, which a forked child lacks.
        keep_for_ever(mlir.global_thread_pool)
        mlir.global_thread_pool = self.ir.ThreadPool()

    def context(self) -> Any:
        """A fresh context with StableHLO, CHLO, and Shardy's dialect, in which JAX annotates its LAPACK calls."""
        context = self.ir.Context()
        for dialect in self._dialects:
            dialect.register_dialect(context)
        return context

    def full_context(self) -> Any:
        """A fresh context that knows func, too, which else comes with an artifact."""
        from jax.interpreters.mlir import make_ir_context

        return make_ir_context()


@cache
def mlir() -> Mlir:
    """Imports the bindings once per process."""
    return Mlir()


def settings() -> Mapping[str, str]:
    """JAX's settings, on some of which it depends what a body is lowered to."""
    import jax

    return {name: repr(value) for name, value in jax.config.values.items()}


def fingerprint(device: Any) -> str:
    """What XLA's compiler knows of a device, the features of a processor among it."""
    return str(load().jax.get_topology_for_devices([device]).fingerprint())


@cache
def embedded_cpu() -> Any:
    """The embedded CPU client: the package's own, so that the user's JAX settings neither matter nor change."""
    # Synchronous: an eager reader of a CPU tensor has nothing to wait on, so every call waits for its results anyway,
    # and running in the caller's thread saves 25 us of hand-over per call.
    return load().xla_client.make_cpu_client(asynchronous=False)


def maker_like(buffer: Any) -> Any:
    """What makes a result of a run, by its `consume_with_handlers`, into a buffer of the shape, dtype and device of another.

    jaxlib finds out neither then, which is half of a small run.
    """
    handler = load().xla_client.array_result_handler
    return handler(buffer.aval, buffer.sharding, committed=buffer.committed, _skip_checks=True)


def moved(buffer: Any, device: Any) -> Any:
    """A copy of a buffer on another device, of any client.

    Raises:
        Jaxlib.Error: the run that makes it failed, or the buffer was given away, of which JAX has no error of its own.
    """
    import jax

    try:
        with jax.enable_x64(True):  # else 64-bit numbers would become 32-bit ones on their way
            return jax.device_put(buffer, device)
    except RuntimeError as error:
        raise load().Error(str(error)) from error


def known_platforms() -> set[str]:
    """Names of the platforms that JAX has, plugins that it found included."""
    from jax._src import xla_bridge

    return set(xla_bridge.known_platforms())


def plugin_client(path: str) -> Any:
    """A client of the PJRT plugin in a shared library, which is loaded once per process.

    Raises:
        Jaxlib.Error: it cannot be loaded, is no PJRT plugin, or finds no device.
    """
    xla_client = load().xla_client
    if not xla_client.pjrt_plugin_loaded(path):
        xla_client.load_pjrt_plugin_dynamically(path, path)
    if not xla_client.pjrt_plugin_initialized(path):
        xla_client.initialize_pjrt_plugin(path)
    return xla_client.make_c_api_client(path, {}, None)


def topology(platform: str, name: str) -> Any:
    """A topology of devices that need not be here.

    Raises:
        Jaxlib.Error: the platform's plugin knows no such topology.
    """
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform=platform, topology_name=name)


def compile_options(device: Any) -> Any:
    """XLA's options for a program of one device."""
    import numpy as np

    xla_client = load().xla_client
    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    return options


def compile_on(client: Any, device: Any, module: bytes | str) -> Any:
    """A loaded executable of a StableHLO module (bytecode or text).

    On the CPU, if the library that XLA gives reductions to would change their numbers, XLA compiles anew without it.

    Raises:
        Jaxlib.Error: XLA refused the module.
    """
    devices, options = load().jax.DeviceList((device,)), compile_options(device)
    _prepare_calls(module)
    with load().TracebackScope():
        executable = client.compile_and_load(module, devices, options)
        if device.platform != "cpu" or all(map(keeps_numbers, _hlo_of(executable))):
            return executable
        options.env_option_overrides = [*options.env_option_overrides, WITHOUT_REDUCTIONS]
        return client.compile_and_load(module, devices, options)


def _prepare_calls(program: bytes | str) -> None:
    """Makes ready the library that a module or a serialized executable calls by name: LAPACK, which is SciPy's.

    JAX does so where it lowers such a call. A process that finds on disk what another one lowered or compiled does not, and
    would die in the call.
    """
    name = _LAPACK if isinstance(program, str) else _LAPACK.encode()
    if name in program:  # type: ignore[operator]
        _prepare_lapack()


@cache
def _prepare_lapack() -> None:
    import numpy as np
    from jaxlib import lapack

    lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))


def _hlo_of(executable: Any) -> Iterator[str]:
    """The optimized modules, without their constants."""
    from jaxlib import _hlo

    printed = _hlo.HloPrintOptions.short_parsable()
    printed.print_large_constants = False
    return (module.to_string(printed) for module in executable.hlo_modules())


def compile_ahead(device: Any, module: bytes) -> Any:
    """An executable, not loaded, for a device of a topology, which is not here.

    Raises:
        Jaxlib.Error: the target's compiler refused the module.
    """
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    bindings, devices = mlir(), load().jax.DeviceList((device,))
    # The compile-only client takes a module, where the others take its bytes.
    with bindings.context() as context:
        registry = bindings.ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        return device.client.compile(bindings.ir.Module.parse(module), devices, compile_options(device))


def load_on(client: Any, device: Any, serialized: bytes) -> Any:
    """A loaded executable of what `compile_module` serialized."""
    _prepare_calls(serialized)
    with load().TracebackScope():
        return client.deserialize_executable(serialized, load().jax.DeviceList((device,)), compile_options(device))


def compile_module(module: bytes) -> Serialized | Rejected:
    """Compiles a StableHLO module (bytecode or text) and serializes the executable; runs in the child (`runtime.compiler`)."""
    client = embedded_cpu()
    error = load().Error
    try:
        executable = compile_on(client, client.devices()[0], module)
    except error as refusal:
        return Rejected(str(refusal))
    try:
        return Serialized(executable.serialize())
    except error:
        return Serialized(None)
