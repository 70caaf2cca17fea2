"""Dynamo's settings, exceptions and lock, and the modules and functions that torch.compile returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, reset_code, set_code_exec_strategy
from torch._dynamo import config, graph_bytecode_inputs, trace_rules, utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._higher_order_ops import utils as higher_order_ops

from dynaxla.torch_api.frames import variables_of
from dynaxla.torch_api.modules import compiled_call

__all__ = ["BackendCompilerFailed", "TorchDynamoException", "compile_lock"]
# BackendCompilerFailed: wraps a backend's exception, its `inner_exception`.
# TorchDynamoException: base of the exceptions by which Dynamo and AOTAutograd restart a capture.
# compile_lock: the capturing thread holds it.


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Has Dynamo make a dim of an input symbolic at the first call. Relies on `torch._dynamo.mark_dynamic`."""
    torch._dynamo.mark_dynamic(tensor, dim)


def mark_maybe_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Has Dynamo make a dim of an input symbolic at the next capture if it can. Returns whether the dim was not marked before.

    Adds no guard, so that unmarked tensors use the same graph. Relies on the attribute
    `_dynamo_propagated_dynamic_indices`, with which AOTAutograd marks a graph's results for Dynamo.
    """
    marked_dims: set[int] = getattr(tensor, "_dynamo_propagated_dynamic_indices", set())
    tensor._dynamo_propagated_dynamic_indices = marked_dims | {dim}  # type: ignore[attr-defined]
    return dim not in marked_dims


def is_automatic_dynamic() -> bool:
    """Whether Dynamo makes sizes symbolic automatically. Relies on the setting that torch.compile(dynamic=False)
    changes while it captures."""
    return config.automatic_dynamic_shapes


def make_recapture_error() -> Exception:
    """Makes the exception that a backend raises to have Dynamo capture again, after it marked more dims of the inputs.

    Relies on `TensorifyScalarRestartAnalysis`, the only restart exception that Dynamo lets through from a backend.
    """
    return TensorifyScalarRestartAnalysis(restart_reason="sizes of caches vary")


def find_undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that `torch._dynamo.disable` was given, which wraps AOTAutograd's functions, and any other as it is.

    Relies on `innermost_fn`.
    """
    return innermost_fn(function)  # type: ignore[no-any-return]


def lift_capture_limits() -> AbstractContextManager[None]:
    """Context without limits on the number of captures of a function. Relies on the two limits of `torch._dynamo.config`."""
    return config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)  # type: ignore[no-any-return]


def is_fully_dynamic() -> bool:
    """Whether a capture makes every size symbolic. Relies on the setting that torch.compile(dynamic=True) changes while
    it captures."""
    return not config.assume_static_by_default


def forget(code: CodeType) -> None:
    """Drops Dynamo's captures of a function. Relies on `torch._C._dynamo.eval_frame.reset_code`."""
    reset_code(code)


def leave_streams_to_python(device: torch.device) -> None:
    """Has Dynamo skip the function with which its own code looks up a device's stream: such a capture would never be released.

    Dynamo's code looks up the stream before every call of a graph if there is an accelerator. For a device with one
    stream a dict, whose method is a C function, answers in a tenth of the time.

    Relies on `get_current_stream` and `store_user_object_weakrefs`, which that code looks up in their modules by these
    names, and on `set_code_exec_strategy`. A capture references the code of the whole stack, the function that looks up
    the stream included.

    Args:
        device: it has one stream for the lifetime of the process.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for asks in (utils.get_current_stream, graph_bytecode_inputs.store_user_object_weakrefs):
        set_code_exec_strategy(asks.__code__, skip)
    streams = _Streams(utils.get_current_stream)
    streams[device] = torch.accelerator.current_stream(device)
    utils.get_current_stream = streams.__getitem__  # type: ignore[assignment]


@cache
def mark_calls_in_profiles_alone() -> None:
    """Has Dynamo's generated code mark calls of graphs for torch's profiler only while the profiler records, once per process.

    Dynamo's own marks go through wrappers that keep Dynamo from tracing them; these take a fifth of Dynamo's time per
    call.

    Relies on `record_pregraph_bytecode_enter` and `record_pregraph_bytecode_exit`, which that code looks up in their
    module by these names, the second taking the result of the first; on `torch.autograd.profiler._is_profiler_enabled`;
    and on `set_code_exec_strategy`.
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
    """Has torch.cond and similar ops, called outside of a capture, begin only while no other thread captures.

    Each saves a flag of the whole process, whether something is being traced, and restores it at the end. If it began
    while another thread traces, it would restore the flag to true for ever, and every later call of a compiled function
    would raise.

    Relies on `_set_compilation_env` of torch._higher_order_ops.utils, which saves and sets the flag, and which that
    module looks up by this name.
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
    """Maps each registered device to its only stream; asks torch for the streams of other devices."""

    def __init__(self, ask: Callable[[torch.device], torch.Stream]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, device: torch.device) -> torch.Stream:
        return self._ask(device)


def is_left_to_python(function: Callable[..., Any]) -> bool:
    """Whether Dynamo skips a function, such as all code of torch.nn. Relies on `trace_rules.check`."""
    return trace_rules.check(function)


def leave_modules_to_python(names: Iterable[str]) -> None:
    """Has Dynamo run the functions of these modules, and of packages with all their modules, as they are: one that is called
    in a compiled function breaks its graph, and between two graphs none is traced.

    Relies on `trace_rules.add`.
    """
    for name in names:
        trace_rules.add(name)


def backend_of(compiled: Any) -> Any:
    """Returns the backend object of a module or function made by torch.compile, or of a module compiled in place; else None.

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
    """Returns the backend object of the compiled function being called; None in a backward pass or outside of calls.

    Relies on `compile_wrapper` of torch._dynamo.eval_frame, in which such a call runs, and on its variable `self`.
    """
    variables = variables_of("compile_wrapper", "torch._dynamo.eval_frame")
    return None if variables is None else _backend(variables.get("self"))


def name_of(backend: Any) -> str | None:
    """Returns the name with which a backend object was requested. Relies on `compiler_name`, which torch.compile's
    wrapper has."""
    return getattr(backend, "compiler_name", None)


def is_ours(compiler: Any) -> bool:
    """Whether Dynamo captures for this package's backend. Relies on `innermost_backend`, which removes wrappers."""
    return name_of(innermost_backend(compiler)) == "dynaxla"


def _backend(context: Any) -> Any:
    callback = getattr(context, "callback", None)
    return None if callback is None else innermost_backend(callback)
