"""Every attribute of torch that the package replaces, why, and when the replacement can go.

docs/torch_patches.md is generated from this list. Importing a module replaces nothing: patches for captures are applied when
torch.compile asks for the backend, patches for the device when `dynaxla.use` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dynaxla.torch_api.aot import keep_known_sizes
from dynaxla.torch_api.aot_outputs import (
    copy_what_is_no_view,
    make_detached_outputs_of_others,
    take_gradients_of_overlaps,
)
from dynaxla.torch_api.capture_limit import raise_limit
from dynaxla.torch_api.captured_functions import RNN_OPS, capture_checks, capture_rnns, capture_scans
from dynaxla.torch_api.dynamo import begin_branches_between_captures, compile_lock, mark_calls_in_profiles_alone
from dynaxla.torch_api.dynamo_packages import mend_packages
from dynaxla.torch_api.flex import accept_tensors
from dynaxla.torch_api.meta_kernels import refuse_lossy_writes
from dynaxla.torch_api.undefined_gradients import leave_undefined


@dataclass(frozen=True, slots=True)
class Patch:
    """Attributes of torch that one function replaces.

    Attributes:
        function: module of torch_api and name of the function; its docstring says what it relies on.
        replaces: the attributes, by their full names.
        why: what torch does without the patch.
        since: the earliest version of torch known to need the patch.
        until: the condition on torch under which the patch can be removed.
        when: "compile": torch.compile asked for the backend; "device": `dynaxla.use` was called.
    """

    function: str
    replaces: tuple[str, ...]
    why: str
    since: str
    until: str
    when: Literal["compile", "device"]


_GUARDS, _PACKAGE = "torch._dynamo.guards", "torch._dynamo.package"

PATCHES = (
    Patch(
        "profiler.record_devices",
        tuple(
            f"torch.profiler.profiler._KinetoProfile.{name}"
            for name in ("start_trace", "stop_trace", "export_chrome_trace")
        ),
        "`torch.profiler` knows nothing of PJRT's devices: its traces show the host alone",
        "2.13",
        "torch lets a backend in Python add events to a profile",
        "compile",
    ),
    Patch(
        "dynamo_packages.mend_packages",
        (
            "torch._dynamo.output_graph.unique_id",
            "torch._dynamo.symbolic_convert.unique_id",
            f"{_GUARDS}.GuardsStatePickler",
            f"{_GUARDS}.pickle_guards_state",
            f"{_GUARDS}.CheckFunctionManager.serialize_guards",
            f"{_PACKAGE}.CompilePackage.initialize",
            f"{_PACKAGE}.CompilePackage.install",
            f"{_PACKAGE}.CompilePackage.add_guarded_code",
            f"{_PACKAGE}.CompilePackage.uninstall",
            f"{_PACKAGE}.load_guard_manager",
        ),
        "`caching_precompile` saves functions behind `functools.wraps` wrongly: a second process fails or uses "
        "another function's capture",
        "2.13",
        "the tests of tests/torch_api/test_dynamo_packages.py pass without it",
        "compile",
    ),
    Patch(
        "capture_limit.raise_limit",
        ("torch._dynamo.convert_frame.exceeds_recompile_limit",),
        "Dynamo runs a function in eager after 8 captures, which all models of its class share; generation needs more",
        "2.13",
        "a backend can set its own `recompile_limit`",
        "compile",
    ),
    Patch(
        "captured_functions.capture_checks",
        ("torch._dynamo.variables.TorchInGraphFunctionVariable._get_handlers()[torch._check_tensor_all]",),
        "Dynamo ends the graph at `torch._check_tensor_all`",
        "2.13",
        "Dynamo captures the check as it captures `assert`",
        "compile",
    ),
    Patch(
        "captured_functions.capture_scans",
        ("torch._higher_order_ops.associative_scan.generic_associative_scan",),
        "Dynamo captures a generic associative scan again for nearly every size",
        "2.13",
        "its implementation has no guards on the parity of a size",
        "compile",
    ),
    Patch(
        "dynamo.begin_branches_between_captures",
        ("torch._higher_order_ops.utils._set_compilation_env",),
        "`torch.cond` in one thread, while another captures, leaves a flag of the whole process set: later calls raise",
        "2.13",
        "the flag is kept per thread",
        "compile",
    ),
    Patch(
        "captured_functions.capture_rnns",
        (
            "torch._dynamo.variables.builder.VariableBuilder.wrap_module",
            *(
                f"torch._dynamo.variables.TorchInGraphFunctionVariable._get_handlers()[torch.{name}]"
                for name in RNN_OPS
            ),
        ),
        "Dynamo ends the graph at `nn.LSTM`, `nn.GRU` and `nn.RNN` unless a setting of all backends says otherwise, and then "
        "runs every step to know the results' sizes, and captures each length again",
        "2.13",
        "`torch._dynamo.config.allow_rnn` is on by default, and lengths may vary",
        "compile",
    ),
    Patch(
        "aot.keep_known_sizes",
        ("torch.fx.experimental.proxy_tensor._sym_register",),
        "the trace of a backward through a DTensor, one of whose inner sizes varies, ends in a RecursionError",
        "2.13",
        "`set_proxy_slot` keeps what `sympy_expr_tracker` has of a symbol",
        "compile",
    ),
    Patch(
        "aot_outputs.copy_what_is_no_view",
        ("torch._functorch._aot_autograd.runtime_wrappers.gen_alias_from_base",),
        "`x.mul_(2); return x[None].reshape(-1)` raises for an input with gaps, of which eager returns a copy",
        "2.13",
        "functionalization gives the value of a written input the input's strides",
        "compile",
    ),
    Patch(
        "aot_outputs.make_detached_outputs_of_others",
        ("torch._functorch._aot_autograd.runtime_wrappers._HANDLER_MAP (of outputs that are made of another one)",),
        "of `y = (x * 2).t(); return y, y.detach()` the second output is transposed twice, where x needs a gradient",
        "2.13",
        "AOTAutograd applies no views to an output that is like the one that it is made of",
        "compile",
    ),
    Patch(
        "aot_outputs.take_gradients_of_overlaps",
        ("torch._functorch._aot_autograd.schemas.MemoryFormatMeta.from_tensor",),
        "gradients of a result such as `x.exp().unfold(0, 2, 1)` are wrong: elements that share memory keep the last one",
        "2.13",
        "AOTAutograd asks for no strides in which elements share memory, other than those of `expand`",
        "compile",
    ),
    Patch(
        "undefined_gradients.leave_undefined",
        ("torch._functorch._aot_autograd.runtime_wrappers._AOTDispatchAutogradFunctionFactory.build",),
        "gradients of results that nothing is differentiated of are zeros, with which the backward computes: of "
        "`x * 2, x.log()` with the second unused, x = 0 has the gradient NaN",
        "2.13",
        "the backward of AOTAutograd's graphs can take undefined gradients, and leave out what they alone determine",
        "compile",
    ),
    Patch(
        "meta_kernels.refuse_lossy_writes",
        tuple(
            f"torch.ops.aten.{name} (its kernel for meta tensors)"
            for name in (
                *("add_.Tensor", "add_.Scalar", "sub_.Tensor", "sub_.Scalar", "mul_.Tensor", "mul_.Scalar"),
                *("addcmul_.default", "addcdiv_.default", "ldexp_.default", "logit_.default"),
            )
        ),
        "captures of `whole.mul_(real)` and its like, which eager refuses, drop fractions and imaginary parts",
        "2.13",
        "the meta kernels of these ops refuse what eager refuses",
        "compile",
    ),
    Patch(
        "dynamo.mark_calls_in_profiles_alone",
        ("torch._dynamo.utils.record_pregraph_bytecode_enter", "torch._dynamo.utils.record_pregraph_bytecode_exit"),
        "marks for the profiler take a fifth of Dynamo's time per call, even while no profiler runs",
        "2.13",
        "Dynamo makes the marks only while a profiler runs",
        "compile",
    ),
    Patch(
        "private_device.give_storages",
        ("torch.storage.UntypedStorage.__new__",),
        "torch creates storages with a device's allocator, which only C++ can register",
        "2.13",
        "a device in Python can register an allocator",
        "device",
    ),
    Patch(
        "generators.give_generators",
        ("torch.Generator",),
        "only C++ can create generators of a device",
        "2.13",
        "a device in Python can create generators",
        "device",
    ),
    Patch(
        "module_conversions.move_states_of_fsdp",
        ("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device",),
        "`fully_shard` of a module on the host gives parameters the device's data, which torch refuses",
        "2.13",
        "`Tensor.data` takes data of another device than CUDA's",
        "device",
    ),
    Patch(
        "c10d.keep_used_parameters_on_host",
        ("torch.distributed.Reducer",),
        "DDP with `find_unused_parameters` or `static_graph` asks for pinned memory, whose allocator only C++ can register",
        "2.13",
        "a device in Python can register an allocator of pinned memory",
        "device",
    ),
    Patch(
        "c10d.keep_permutations",
        ("torch.distributed._functional_collectives.permute_tensor",),
        "a graph has a permutation as the sizes of one process's pieces, which tell nothing of the other processes",
        "2.13",
        "torch has a functional collective for permutations",
        "device",
    ),
    Patch(
        "sharded_checkpoints.offer_shards",
        tuple(
            f"torch.Tensor.{name} (added)"
            for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
        ),
        "planners of `torch.distributed.checkpoint` write a tensor whole that is no subclass; added where there are meshes",
        "2.13",
        "a device can say in which shards its tensors are",
        "device",
    ),
    Patch(
        "generators.draw_shards_apart",
        ("torch.distributed.tensor._random.OffsetBasedRNGTracker._distribute_region",),
        "traced draws of a DTensor are the same for all its shards, as are those for shards of less than four elements",
        "2.13",
        "torch traces the draws of other devices than CUDA, and counts shards in place of elements",
        "device",
    ),
    Patch(
        "flex.accept_tensors",
        ("torch.nn.attention.flex_attention._validate_device",),
        "`flex_attention` refuses every device that torch does not know, and gradients on the CPU, which the graphs here have",
        "2.13",
        "`flex_attention` asks the backend what it supports",
        "compile",
    ),
    Patch(
        "module_conversions.keep_parameters",
        ("torch.nn.modules.module.Module._apply",),
        "`model.to(device)` makes new parameters, one for each use of a tied one; an optimizer still has the old ones",
        "2.13",
        "`torch.__future__.set_swap_module_params_on_conversion` is on by default",
        "device",
    ),
    Patch(
        "meta_kernels.use_cpu_meta_kernels",
        (
            "torch._meta_registrations.device_hint",
            "torch._subclasses.fake_tensor.FakeTensorMode.dispatch",
        ),
        "some meta kernels return CUDA's sizes, dtypes and strides for every device but the CPU",
        "2.13",
        "a device can choose the meta kernels of the CPU",
        "device",
    ),
    Patch(
        "backward_passes.run_backward_in_caller",
        ("torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward"),
        "autograd's engine starts no thread for a device registered after the first backward, and fails",
        "2.13",
        "the engine starts threads for devices registered later",
        "device",
    ),
    Patch(
        "dynamo.leave_streams_to_python",
        ("torch._dynamo.utils.get_current_stream",),
        "Dynamo captures its own code that looks up a stream, and never releases the captures",
        "2.13",
        "Dynamo skips that code",
        "device",
    ),
    Patch(
        "private_device.answer_for_accelerator",
        (
            "torch.accelerator.synchronize",
            "torch.accelerator.current_stream",
            "torch.accelerator.memory_allocated",
            "torch.accelerator.max_memory_allocated",
            "torch.accelerator.memory_stats",
            "torch.accelerator.empty_cache",
            "torch.accelerator.memory.memory_allocated",
            "torch.accelerator.memory.max_memory_allocated",
            "torch.accelerator.memory.memory_stats",
            "torch.accelerator.memory.empty_cache",
        ),
        "`torch.accelerator` calls C++ instead of the device's Python module",
        "2.13",
        "torch calls the device's module",
        "device",
    ),
    Patch(
        "private_device.exchange_by_dlpack",
        ("torch._C._from_dlpack", "torch.Tensor.__dlpack__", "torch.Tensor.__dlpack_device__", "torch.asarray"),
        "`__dlpack_device__` raises for a renamed device, and an imported tensor has a storage that the device does not know",
        "2.13",
        "torch asks a device in Python how it exchanges tensors",
        "device",
    ),
    Patch(
        "private_device.set_printer",
        ("torch._tensor_str._tensor_str",),
        "printing a tensor of the device runs many ops on the device",
        "2.13",
        "torch prints tensors of every device from a copy on the CPU",
        "device",
    ),
)

_AT_COMPILE: tuple[Callable[[], object], ...] = (
    mend_packages,  # torch asks for the backend before it loads saved captures
    raise_limit,
    capture_checks,
    capture_scans,
    begin_branches_between_captures,
    capture_rnns,
    accept_tensors,
    keep_known_sizes,
    copy_what_is_no_view,
    make_detached_outputs_of_others,
    take_gradients_of_overlaps,
    leave_undefined,
    refuse_lossy_writes,
    mark_calls_in_profiles_alone,
)


def apply_patches() -> None:
    """Applies the patches of "compile", once per process, while no thread captures. Relies on what each patch relies on."""
    with compile_lock:
        _apply_once()


@cache
def _apply_once() -> None:
    for apply in _AT_COMPILE:
        apply()
