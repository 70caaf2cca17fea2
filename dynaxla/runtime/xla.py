"""The interface to jaxlib: the only importer of its internals and of JAX's (jax._src, jax.interpreters, jax.extend).

PJRT's clients, buffers and executables, and the MLIR bindings with StableHLO. Imports no torch, as the compiling child
process uses it. Written for jax and jaxlib 0.10.2 and 0.11.2; tests/torch_api/test_jaxlib.py checks each name that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from dynaxla.isolation.forking import keep_alive, notify_after_fork
from dynaxla.isolation.once import once
from dynaxla.runtime.executable_info import (
    WITHOUT_REDUCTIONS,
    CompileRejected,
    ModuleRequest,
    SerializedExecutable,
    choose_loops,
    has_exact_fusions,
    processes_of,
)
from dynaxla.runtime.known_nan import guard_exponentials, loses_nan

_HANDLERS_CHECK_NOTHING = 489
"""The version of jaxlib's bindings from which handlers of results check nothing, and are not told so: in jaxlib 0.11."""

_LAPACK = "lapack_"
"""Prefix of the LAPACK functions that JAX's lowerings call."""


class Jaxlib:
    """jaxlib's PJRT bindings, loaded.

    Attributes:
        Error: the exception class of PJRT and XLA.
        to_buffer: converts a DLPack capsule to a buffer, which shares its memory if possible; device and stream may be None.
        to_capsule: converts a buffer to a DLPack capsule; `stream` waits for the run that computes the buffer.
        profiler: XLA's profiler.
        array_handler: makes a handler for `consume_with_handlers`, of an aval and a sharding, which checks nothing.
        TracebackScope: a context manager; programs and buffers that this thread makes in it reference no code of frames
            outside of it. Dynamo frees a compiled function when the code it generated is freed: a program, weight or result
            with a native reference to that code, invisible to the collector, would leak it past torch._dynamo.reset().
    """

    def __init__(self) -> None:
        from jaxlib import _jax, _profiler, xla_client

        self.xla_client: Any = xla_client
        self.jax: Any = _jax
        self.profiler: Any = _profiler
        self.Error: type[Exception] = xla_client.XlaRuntimeError
        self.to_buffer: Any = _jax.dlpack_managed_tensor_to_buffer
        self.to_capsule: Any = _jax.buffer_to_dlpack_managed_tensor
        self.TracebackScope: Any = _jax.TracebackScope
        handler = xla_client.array_result_handler
        unchecked = xla_client._version >= _HANDLERS_CHECK_NOTHING
        self.array_handler: Any = handler if unchecked else partial(handler, _skip_checks=True)


@once
def load() -> Jaxlib:
    """Imports jaxlib once per process; creates no client and probes no device."""
    return Jaxlib()


class MlirBindings:
    """jaxlib's MLIR bindings, loaded; they have StableHLO but no torch dialect.

    Attributes:
        ir, stablehlo: the bindings' modules.
        pass_manager: MLIR's pass manager.
    """

    def __init__(self) -> None:
        from jax.extend.mlir import ir, passmanager
        from jax.extend.mlir.dialects import chlo, sdy, stablehlo

        self.ir: Any = ir
        self.pass_manager: Any = passmanager.PassManager
        self.stablehlo: Any = stablehlo
        self._dialects = (chlo, stablehlo, sdy)
        self.after_fork()  # the parent may have used JAX without this package
        notify_after_fork(self)

    def after_fork(self) -> None:
        from jax._src.interpreters import mlir

        # Contexts verify modules on JAX's threads, which a forked child lacks.
        keep_alive(mlir.global_thread_pool)
        mlir.global_thread_pool = self.ir.ThreadPool()

    def context(self) -> Any:
        """Makes a context with StableHLO, CHLO and Shardy's dialect, which JAX annotates LAPACK calls with."""
        context = self.ir.Context()
        for dialect in self._dialects:
            dialect.register_dialect(context)
        return context

    def full_context(self) -> Any:
        """Makes a context that also has the func dialect, which `context` gets from an artifact only."""
        from jax.interpreters.mlir import make_ir_context

        return make_ir_context()


@once
def mlir() -> MlirBindings:
    """Imports the bindings once per process."""
    return MlirBindings()


def new_primitive(
    name: str, infer_shape: Callable[..., tuple[int, ...]], emit: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes a JAX function that is lowered to one operation, whose result has its operand's dtype.

    Args:
        infer_shape: gives the result's shape, of the operand's shape and the parameters.
        emit: makes the operation, of the result's MLIR type, the operand and the parameters; returns the result.
    """
    from jax.extend.core import Primitive
    from jax.interpreters.mlir import register_lowering

    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **parameters: x.update(shape=infer_shape(x.shape, **parameters)))

    def lower(context: Any, operand: Any, **parameters: Any) -> list[Any]:
        (result,) = context.avals_out
        ranked = mlir().ir.RankedTensorType
        return [emit(ranked.get(result.shape, ranked(operand.type).element_type), operand, **parameters)]

    register_lowering(primitive, lower)
    return primitive.bind  # type: ignore[no-any-return]


def settings() -> Mapping[str, str]:
    """JAX's settings, some of which affect the lowering of op bodies."""
    import jax

    return {name: repr(value) for name, value in jax.config.values.items()}


def fingerprint(device: Any) -> str:
    """XLA's fingerprint of a device, which includes a processor's features."""
    return str(load().jax.get_topology_for_devices([device]).fingerprint())


@cache
def embedded_cpu(devices: int | None = None) -> Any:
    """The package's own CPU client, so that it neither depends on the user's JAX settings nor changes them.

    Args:
        devices: how many devices the processor is shown as; None: as many as XLA_FLAGS says, else one.
    """
    # Synchronous: an eager reader of a CPU tensor has nothing to wait on, so every call waits for its results anyway,
    # and running in the caller's thread saves 25 us of thread handover per call.
    return load().xla_client.make_cpu_client(asynchronous=False, num_devices=devices)


def buffer_maker(buffer: Any) -> Any:
    """Returns a handler for `consume_with_handlers` that makes buffers of the shape, dtype and device of `buffer`.

    It saves jaxlib the computation of these, which is half of a small run's time.
    """
    return load().array_handler(buffer.aval, buffer.sharding, committed=buffer.committed)


def global_handler(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """A handler for `consume_with_handlers` that makes sharded arrays of a shape and a torch dtype."""
    import jax

    aval = jax.core.ShapedArray(shape, jax.numpy.dtype(str(dtype).removeprefix("torch.")))
    return load().array_handler(aval, sharding, committed=True)


def read_output_axes(executable: Any, mesh: Any, results: int) -> list[tuple[tuple[str, ...], ...] | None]:
    """For each result of an executable the axes of JAX's mesh over which its dims are split; dims at the end may be left out,
    and a result is None if no axes say how it is split.

    Relies on `get_output_shardings` and on JAX's parser of what that gives.
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding

    found: list[tuple[tuple[str, ...], ...] | None] = []
    for sharding in executable.get_output_shardings() or ():
        try:
            for spec in parse_flatten_op_sharding(sharding, mesh):
                found.append(tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec))
        except (ValueError, NotImplementedError, AssertionError, StopIteration):  # split within an axis
            found.append(None)
    return found if len(found) == results else [None] * results


def copy_to_device(buffer: Any, device: Any) -> Any:
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
    """The names of JAX's platforms, those of plugins included."""
    from jax._src import xla_bridge

    return set(xla_bridge.known_platforms())


def find_cluster(timeout_s: int) -> tuple[str | None, int | None, int | None]:
    """The coordinator's address, the number of processes and this one's number, as jax.distributed finds them, or None."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0], None, timeout_s)[:3]


@contextmanager
def joining_backends(coordination: Any, rank: int, size: int) -> Iterator[None]:
    """Has backends that JAX makes meanwhile join those of other processes, as after `jax.distributed.initialize`.

    Relies on the state of `jax._src.distributed`. JAX's own functions would listen for SIGTERM and end a process with another.
    """
    from jax._src.distributed import global_state as state

    before = state.client, state.process_id, state.num_processes
    state.client, state.process_id, state.num_processes = coordination, rank, size
    try:
        yield
    finally:
        state.client, state.process_id, state.num_processes = before


def plugin_client(path: str, coordination: Any = None, rank: int = 0, size: int = 1) -> Any:
    """Makes a client of the PJRT plugin in a shared library, which is loaded once per process.

    Args:
        coordination: the process's client of the coordination service of several processes; None: it is alone.

    Raises:
        Jaxlib.Error: the library cannot be loaded, is no PJRT plugin, or finds no device.
    """
    xla_client = load().xla_client
    if not xla_client.pjrt_plugin_loaded(path):
        load().profiler.register_plugin_profiler(xla_client.load_pjrt_plugin_dynamically(path, path))
    if not xla_client.pjrt_plugin_initialized(path):
        xla_client.initialize_pjrt_plugin(path)
    options = {} if coordination is None else {"node_id": rank, "num_nodes": size}
    return xla_client.make_c_api_client(path, options, coordination)


def has_libtpu_without_chip() -> bool:
    """Whether libtpu is loaded, by JAX, say, without a chip: its profiler, in every session of XLA's, ends the process then."""
    if not load().xla_client.pjrt_plugin_loaded("tpu"):
        return False
    from jax._src import xla_bridge

    return "tpu" not in xla_bridge._backends


def topology(platform: str, name: str) -> Any:
    """A topology of devices, which may be absent.

    Raises:
        Jaxlib.Error: the platform's plugin knows no such topology.
    """
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform=platform, topology_name=name)


def compile_options(devices: Sequence[Any], *, replicas: bool = False) -> Any:
    """XLA's options for a program of one device, one that Shardy partitions over several, or one that each of several runs."""
    import numpy as np

    xla_client = load().xla_client
    options = xla_client.CompileOptions()
    count = len(devices)
    options.num_replicas, options.num_partitions = (count, 1) if replicas else (1, count)
    ids = np.array([[device.id for device in devices]])
    options.device_assignment = xla_client.DeviceAssignment.create(ids.T if replicas else ids)
    if options.num_partitions > 1:
        built = options.executable_build_options
        built.use_spmd_partitioning = built.use_shardy_partitioner = True
        built.allow_spmd_sharding_propagation_to_output = [True]  # of all results
    if devices[0].platform == "tpu":  # values of bfloat16 are kept as such, not as float32
        options.env_option_overrides = [("xla_allow_excess_precision", False)]
    return options


def compile_on(client: Any, devices: Sequence[Any], module: bytes | str, options: Any) -> Any:
    """Compiles and loads a StableHLO module (bytecode or text), partitioned over these devices, or run by each of them. On the
    CPU compiles again what would give other results: with NaN told apart, or without the library for reductions.

    Args:
        devices: one, or those over which the module is partitioned, or that each run it.
        options: of these devices, see `compile_options`.

    Raises:
        Jaxlib.Error: XLA refused the module.
    """
    listed = load().jax.DeviceList(tuple(devices))
    _prepare_calls(module)
    with load().TracebackScope():
        executable = client.compile_and_load(module, listed, options)
        hlo = _hlo_of(executable) if devices[0].platform == "cpu" else []
        if any(map(loses_nan, hlo)):
            module = guard_exponentials(mlir(), module)
            executable = client.compile_and_load(module, listed, options)
            hlo = _hlo_of(executable)
        if all(map(has_exact_fusions, hlo)):
            return executable
        options.env_option_overrides = [*options.env_option_overrides, WITHOUT_REDUCTIONS]
        return client.compile_and_load(module, listed, options)


def _prepare_calls(program: bytes | str) -> None:
    """Prepares LAPACK (SciPy's) if a module or a serialized executable calls it: JAX does so when it lowers such a call, and
    a process that loads a cached function or executable lowers nothing."""
    name = _LAPACK if isinstance(program, str) else _LAPACK.encode()
    if name in program:  # type: ignore[operator]
        _prepare_lapack()


@once
def _prepare_lapack() -> None:
    import numpy as np
    from jaxlib import lapack

    lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))


def _hlo_of(executable: Any) -> list[str]:
    """The text of the optimized modules, without large constants."""
    from jaxlib import _hlo

    printed = _hlo.HloPrintOptions.short_parsable()
    printed.print_large_constants = False
    return [module.to_string(printed) for module in executable.hlo_modules()]


def compile_ahead(devices: Sequence[Any], module: bytes) -> Any:
    """Compiles a module for devices of a topology, as `compile_on` does, without loading it.

    Raises:
        Jaxlib.Error: the target's compiler refused the module.
    """
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    bindings, listed = mlir(), load().jax.DeviceList(tuple(devices))
    # The compile-only client takes a module, other clients take its bytes.
    with bindings.context() as context:
        registry = bindings.ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        return devices[0].client.compile(bindings.ir.Module.parse(module), listed, compile_options(devices))


def load_on(client: Any, devices: Sequence[Any], serialized: bytes, *, replicas: bool = False) -> Any:
    """Loads an executable that `compile_module` serialized for so many devices, or that each of them runs."""
    _prepare_calls(serialized)
    options, listed = compile_options(devices, replicas=replicas), load().jax.DeviceList(tuple(devices))
    with load().TracebackScope():
        return client.deserialize_executable(serialized, listed, options)


def compile_module(request: ModuleRequest) -> SerializedExecutable | CompileRejected:
    """Compiles a module for the embedded CPU client and serializes the executable; runs in the child process."""
    replicas = len(processes_of(request.module) or ()) if request.partitions == 1 else 0
    count = replicas or request.partitions
    client = embedded_cpu() if count == 1 else embedded_cpu(count)
    error = load().Error
    devices = client.devices()[:count]
    options = choose_loops(compile_options(devices, replicas=replicas > 0), request.module)
    try:
        executable = compile_on(client, devices, request.module, options)
    except error as refusal:
        return CompileRejected(str(refusal))
    try:
        return SerializedExecutable(executable.serialize())
    except error:
        return SerializedExecutable(None)


def splash_attention_gradient() -> Any:
    """The gradient rule of JAX's attention kernels for a TPU, which `jax.vjp` calls after a second forward alone."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel._splash_attention_bwd
