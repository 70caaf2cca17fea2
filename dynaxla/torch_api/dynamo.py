"""Dynamo's settings, exceptions and lock, and what torch.compile returned."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, reset_code, set_code_exec_strategy
from torch._dynamo import config, graph_bytecode_inputs, trace_rules, utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._higher_order_ops import utils as higher_order_ops

from dynaxla.torch_api.frames import variables_of
from dynaxla.torch_api.modules import compiled_call

__all__ = ["BackendCompilerFailed", "TorchDynamoException", "compile_lock"]
# BackendCompilerFailed: around what a backend raises, its `inner_exception`.
# TorchDynamoException: those by which Dynamo, and AOTAutograd within it, has a function captured anew.
# compile_lock: held by the thread that captures.


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Has Dynamo make a dim of an input a symbol at the first call. Relies on `torch._dynamo.mark_dynamic`."""
    torch._dynamo.mark_dynamic(tensor, dim)


def expect_other_sizes(tensor: torch.Tensor, dim: int) -> bool:
    """Has Dynamo make a dim of an input a symbol when it captures anew, if it can be one; whether it was not told so before.

    Without a guard on it, so that tensors that nothing was said of go to the same graph. Relies on the attribute by which
    AOTAutograd tells Dynamo of a graph's results, `_dynamo_propagated_dynamic_indices`.
    """
    told: set[int] = getattr(tensor, "_dynamo_propagated_dynamic_indices", set())
    tensor._dynamo_propagated_dynamic_indices = told | {dim}  # type: ignore[attr-defined]
    return dim not in told


def sizes_may_vary() -> bool:
    """Whether Dynamo makes sizes symbols by itself. Relies on what torch.compile(dynamic=False) sets while it captures."""
    return config.automatic_dynamic_shapes


def capture_again() -> Exception:
    """What a backend raises to be given the graph anew, after it told Dynamo more of its inputs.

    Relies on `TensorifyScalarRestartAnalysis`, the one exception of the kind that Dynamo lets through from a backend.
    """
    return TensorifyScalarRestartAnalysis(restart_reason="sizes of caches vary")


def any_number_of_captures() -> AbstractContextManager[None]:
    """While it lasts, functions are captured however often. Relies on the two limits of `torch._dynamo.config`."""
    return config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)  # type: ignore[no-any-return]


def every_size_varies() -> bool:
    """Whether a capture makes every size a symbol. Relies on what torch.compile(dynamic=True) sets while it captures."""
    return not config.assume_static_by_default


def forget(code: CodeType) -> None:
    """Makes Dynamo forget what it captured of a function. Relies on `torch._C._dynamo.eval_frame.reset_code`."""
    reset_code(code)


def leave_streams_to_python(device: torch.device) -> None:
    """Has Dynamo capture nothing of how its own code asks for a device's stream: what it captured so would never be released.

    That code asks before every call of a graph wherever there is an accelerator. A device of one stream answers from a table,
    by a function of C's, in a tenth of the time.

    Relies on `get_current_stream` and `store_user_object_weakrefs`, which that code finds in their modules by these names, and
    on `set_code_exec_strategy`. A capture holds the code of the whole stack: that of the function which asks among it.

    Args:
        device: it has one stream, for as long as the process lives.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for asks in (utils.get_current_stream, graph_bytecode_inputs.store_user_object_weakrefs):
        set_code_exec_strategy(asks.__code__, skip)
    streams = _Streams(utils.get_current_stream)
    streams[device] = torch.accelerator.current_stream(device)
    utils.get_current_stream = streams.__getitem__  # type: ignore[assignment]


def mark_calls_in_profiles_alone() -> None:
    """Has Dynamo's code around a call of a graph mark it for torch's profiler only while that records something.

    Dynamo's own marks are behind wrappers that keep it from looking at them, which take a fifth of what it does for a call.

    Relies on `record_pregraph_bytecode_enter` and `record_pregraph_bytecode_exit`, which that code finds in their module by
    these names, and of which the second takes what the first gives; on `torch.autograd.profiler._is_profiler_enabled`; and
    on `set_code_exec_strategy`.
    """
    begin, end = utils.record_pregraph_bytecode_enter, utils.record_pregraph_bytecode_exit

    def enter() -> Any:
        return begin() if torch.autograd.profiler._is_profiler_enabled else None

    def leave(mark: Any) -> None:
        if mark is not None:
            end(mark)

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in (enter, leave):
        set_code_exec_strategy(function.__code__, skip)
    utils.record_pregraph_bytecode_enter = enter
    utils.record_pregraph_bytecode_exit = leave  # type: ignore[assignment]


def begin_branches_between_captures() -> None:
    """Has torch.cond and its like, called outside of a capture, begin while no other thread captures.

    Each notes whether something is being traced, which is one flag of the process, and sets it so again when it ends. Begun
    while another thread traces, it would end with a flag that nobody takes back, and from then on every call of a compiled
    function would raise.

    Relies on `_set_compilation_env` of torch._higher_order_ops.utils, which notes and sets the flag, and which its module finds
    by this name.
    """
    begin = higher_order_ops._set_compilation_env

    @contextmanager
    def begin_alone() -> Iterator[None]:
        with ExitStack() as begun:
            with compile_lock:
                begun.enter_context(begin())
            yield

    higher_order_ops._set_compilation_env = begin_alone


class _Streams(dict[torch.device, torch.Stream]):
    """Streams by their devices, of which each has one; those of other devices are asked for."""

    def __init__(self, ask: Callable[[torch.device], torch.Stream]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, device: torch.device) -> torch.Stream:
        return self._ask(device)


def is_left_to_python(function: Callable[..., Any]) -> bool:
    """Whether Dynamo captures nothing of a function, as of all code of torch.nn. Relies on `trace_rules.check`."""
    return trace_rules.check(function)


def backend_of(compiled: Any) -> Any:
    """The backend object of a module or function that torch.compile gave, or of a module compiled in place; else None.

    Relies on `OptimizedModule.dynamo_ctx`; on the variable `self`, Dynamo's context, which the wrapper of a function closes
    over and which has the attribute `get_compiler_config`; and on the context's `callback`.
    """
    call = compiled_call(compiled) or compiled
    if isinstance(call, OptimizedModule):
        return _backend(call.dynamo_ctx)
    if not inspect.isfunction(call) or not hasattr(call, "get_compiler_config"):
        return None
    return _backend(inspect.getclosurevars(call).nonlocals.get("self"))


def called_backend() -> Any:
    """The backend object of the compiled function that is being called; None in a backward pass, or outside of any.

    Relies on `compile_wrapper` of torch._dynamo.eval_frame, in which such a call runs, and its variable `self`.
    """
    variables = variables_of("compile_wrapper", "torch._dynamo.eval_frame")
    return None if variables is None else _backend(variables.get("self"))


def name_of(backend: Any) -> str | None:
    """The name by which a backend object was asked for. Relies on `compiler_name`, which torch.compile's wrapper has."""
    return getattr(backend, "compiler_name", None)


def is_ours(compiler: Any) -> bool:
    """Whether what Dynamo captures for is this package's backend. Relies on `innermost_backend`, which takes wrappers off."""
    return name_of(innermost_backend(compiler)) == "dynaxla"


def _backend(context: Any) -> Any:
    callback = getattr(context, "callback", None)
    return None if callback is None else innermost_backend(callback)
