"""What runtime/xla.py, the wall around jaxlib, and the clients on it rely on. A failure names jaxlib and the function."""

from __future__ import annotations

import functools
import inspect
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax._src.distributed import global_state

from dynaxla.ops.splash_attention import _OF_RULE
from dynaxla.runtime import process_clients, xla
from dynaxla.runtime.executable_info import processes_of
from dynaxla.torch_api.storages import data_address, from_capsule, to_capsule


def boundary(function: Callable[..., Any]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def of_test(test: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(test)
        def run() -> None:
            try:
                test()
            except Exception as error:
                name = f"dynaxla.runtime.xla.{function.__qualname__}"
                raise AssertionError(
                    f"jaxlib {version('jaxlib')} is not as {name} has it: {function.__doc__}"
                ) from error

        return run

    return of_test


@functools.cache
def _module() -> bytes:
    """x + 1 for four float32."""
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compiler_ir("stablehlo")
    return str(lowered).encode()


@boundary(xla.load)
def test_the_bindings_of_pjrt() -> None:
    jaxlib = xla.load()
    assert issubclass(jaxlib.Error, Exception)
    device = xla.embedded_cpu().devices()[0]
    x = torch.arange(64.0)
    buffer = jaxlib.to_buffer(to_capsule(x), device, None)
    assert buffer.unsafe_buffer_pointer() == data_address(x), "memory that is aligned to 64 bytes is shared"
    back = from_capsule(jaxlib.to_capsule(buffer))
    assert data_address(back) == data_address(x)
    assert back.tolist() == x.tolist()


PROFILED = """
import torch
from jax.profiler import ProfileData
from dynaxla.runtime import xla
from dynaxla.torch_api.storages import to_capsule

sine = b"%y = stablehlo.sine %x : tensor<4xf32> return %y : tensor<4xf32>"
module = b"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {" + sine + b"}"
client = xla.embedded_cpu()
compiled = xla.compile_on(client, client.devices(), module, xla.compile_options(client.devices()))
assert not xla.has_libtpu_without_chip()
session = xla.load().profiler.ProfilerSession(xla.load().profiler.ProfileOptions())
compiled.execute_sharded([xla.load().to_buffer(to_capsule(torch.ones(4)), client.devices()[0], None)])
planes = list(ProfileData.from_serialized_xspace(session.stop()).planes)
events = [event for plane in planes for line in plane.lines for event in line.events]
ran = [event for event in events if "hlo_op" in dict(event.stats)]
assert {dict(event.stats)["hlo_module"] for event in ran} == {compiled.hlo_modules()[0].name}
assert all(event.duration_ns > 0 for event in ran)
(environment,) = (plane for plane in planes if plane.name == "Task Environment")
assert dict(environment.stats)["profile_start_time"] > 1e18
"""


@boundary(xla.has_libtpu_without_chip)
def test_a_profile_names_instructions_and_modules() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@boundary(xla.compile_on)
def test_a_module_is_compiled_and_run() -> None:
    client = xla.embedded_cpu()
    device = client.devices()[0]
    executable = xla.compile_on(client, [device], _module(), xla.compile_options([device]))
    argument = xla.load().to_buffer(to_capsule(torch.zeros(4)), device, None)
    ((result,),) = executable.execute_sharded([argument]).disassemble_into_single_device_arrays()
    assert from_capsule(xla.load().to_capsule(result)).tolist() == [1, 1, 1, 1]
    assert executable.hlo_modules()[0].to_string().startswith("HloModule")
    assert executable.get_compiled_memory_stats().output_size_in_bytes == 16
    assert executable.cost_analysis()["flops"] >= 4
    with pytest.raises(xla.load().Error):
        xla.compile_on(client, [device], b"no module", xla.compile_options([device]))


@boundary(xla.buffer_maker)
def test_results_are_made_like_others() -> None:
    client = xla.embedded_cpu()
    device = client.devices()[0]
    executable = xla.compile_on(client, [device], _module(), xla.compile_options([device]))
    argument = xla.load().to_buffer(to_capsule(torch.zeros(4)), device, None)
    ((first,),) = executable.execute_sharded([argument]).disassemble_into_single_device_arrays()
    (second,) = executable.execute_sharded([first]).consume_with_handlers([xla.buffer_maker(first)])
    assert (second.shape, second.dtype, second.sharding) == (first.shape, first.dtype, first.sharding)
    assert from_capsule(xla.load().to_capsule(second)).tolist() == [2, 2, 2, 2]


@boundary(xla.load_on)
def test_a_serialized_program_is_loaded() -> None:
    compiled = xla.compile_module(xla.ModuleRequest(_module()))
    assert isinstance(compiled, xla.SerializedExecutable)
    assert compiled.executable is not None
    client = xla.embedded_cpu()
    executable = xla.load_on(client, client.devices()[:1], compiled.executable)
    assert executable.get_compiled_memory_stats().argument_size_in_bytes == 16
    assert isinstance(xla.compile_module(xla.ModuleRequest(b"no module")), xla.CompileRejected)


@boundary(xla.MlirBindings)
def test_the_bindings_of_mlir_read_stablehlo() -> None:
    bindings = xla.mlir()
    with bindings.full_context():
        module = bindings.ir.Module.parse(_module())
        operation = next(iter(module.body.operations))
        assert str(bindings.ir.StringAttr(operation.attributes["sym_name"]).value) == "main"
    assert bindings.stablehlo.get_current_version()
    with bindings.context() as context:
        made = bindings.ir.Module.parse("module {}")
        artifact = bindings.stablehlo.serialize_portable_artifact(made, bindings.stablehlo.get_current_version())
        assert str(bindings.stablehlo.deserialize_portable_artifact(context, artifact)).strip() == "module {\n}"


@boundary(xla.MlirBindings.after_fork)
def test_jaxs_threads_can_be_replaced() -> None:
    from jax._src.interpreters import mlir

    before = mlir.global_thread_pool
    xla.mlir().after_fork()
    assert type(mlir.global_thread_pool) is type(before)
    assert mlir.global_thread_pool is not before
    assert "stablehlo.add" in str(jax.jit(lambda x: x + 1).lower(jnp.zeros(4)).compiler_ir("stablehlo"))


@boundary(xla.compile_module)
def test_a_module_of_several_processes_is_compiled() -> None:
    module = b"// joint 3,5\n" + _module()
    assert processes_of(module) == (3, 5)
    assert processes_of(_module()) is None
    compiled = xla.compile_module(xla.ModuleRequest(module))
    assert isinstance(compiled, xla.SerializedExecutable)
    assert compiled.executable is not None


@boundary(xla.new_primitive)
def test_a_function_becomes_one_operation() -> None:
    def emit(type: Any, operand: Any, *, times: int) -> Any:
        return xla.mlir().stablehlo.ConcatenateOp([operand] * times, 0).result

    repeat = xla.new_primitive("repeat_rows", lambda shape, times: (times * shape[0],), emit)
    text = str(jax.jit(lambda x: repeat(x, times=3)).lower(jnp.zeros(4)).compiler_ir("stablehlo"))
    assert "tensor<12xf32>" in text
    assert "stablehlo.concatenate" in text


@boundary(xla.find_cluster)
def test_no_cluster_is_found() -> None:
    assert xla.find_cluster(1) == (None, None, None)


@boundary(xla.joining_backends)
@boundary(process_clients.joined_cpu)
def test_clients_join_at_a_coordinator() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    service = process_clients.start_coordinator(port, 1)
    coordination = process_clients.connect_coordinator(f"127.0.0.1:{port}", 0, 60)
    client = process_clients.joined_cpu(coordination, 0, 1, "127.0.0.1", 2)
    device, other = client.devices()
    assert (device.process_index, other.process_index, client.process_index()) == (0, 0, 0)
    coordination.key_value_set("said", "one")
    assert coordination.blocking_key_value_get("said", 1000) == "one"
    with xla.joining_backends(coordination, 0, 1):
        assert global_state.client is coordination
    assert global_state.client is None
    executable = xla.compile_on(client, (device,), _module(), xla.compile_options([device]))
    argument = xla.load().to_buffer(to_capsule(torch.zeros(4)), device, None)
    ((result,),) = executable.execute_sharded([argument]).disassemble_into_single_device_arrays()
    result.block_until_ready()
    assert result.is_ready()
    assert from_capsule(xla.load().to_capsule(result)).tolist() == [1, 1, 1, 1]
    coordination.shutdown()
    service.shutdown()


@boundary(xla.splash_attention_gradient)
def test_the_attention_kernels_have_a_rule_of_differentiation() -> None:
    """With these parameters; tests/ops/test_splash_attention.py compares what it gives."""
    parameters = [*inspect.signature(xla.splash_attention_gradient()).parameters]
    assert parameters == [*_OF_RULE, "res", "do"]
