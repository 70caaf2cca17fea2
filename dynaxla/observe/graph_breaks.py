"""Reads from Dynamo's records where its graphs ended and why; once per graph, never per call."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from traceback import FrameSummary

from torch import nn
from torch.fx import GraphModule

from dynaxla.diagnostics import is_of_library, outermost_function
from dynaxla.torch_api import dynamo, dynamo_capture, modules
from dynaxla.torch_api.capture_limit import most_captures

_WARN_AT = 16


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why a graph ended before its function did.

    Attributes:
        reason: Dynamo's reason, in one line.
        frame: the user's source line that Dynamo could not capture, or None.
    """

    reason: str
    frame: str | None = None

    def __str__(self) -> str:
        return f"{self.reason}; at {self.frame}" if self.frame else self.reason


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """A graph that Dynamo captured.

    Attributes:
        function: the captured function (named by its module's class if it is a module's) and, if an earlier graph ended in
            it, the line after which this graph begins.
        calls: the number of calls in the graph.
        ended: why the graph ended; None if it ended with the function.
        again: Dynamo's reason why the function is captured again: which guard failed; None for its first capture.
    """

    function: str
    calls: int
    ended: GraphBreak | None = None
    again: str | None = None

    def __str__(self) -> str:
        what = f"{self.function}: {self.calls} {'call' if self.calls == 1 else 'calls'}"
        return what if self.ended is None else f"{what}; ends early: {self.ended}"


@dataclass(frozen=True, slots=True)
class LastCapture:
    """A function that Dynamo has captured as often as its recompile limit allows.

    Attributes:
        function: as in `CaptureRecord`.
        count: the number of captures.
        reason: Dynamo's reason for this capture: which of a graph's guards failed.
    """

    function: str
    count: int
    reason: str

    def __str__(self) -> str:
        return (
            f"Dynamo captured {self.function} {self.count} times, which is its limit: calls that fit none of these "
            f"graphs run in eager PyTorch from now on. The last was captured as others do not fit: {self.reason}. Mark "
            f"the sizes that vary at the first call (dynaxla.mark_bucketed), or set torch._dynamo.config.recompile_limit higher"
        )


def read_capture(module: GraphModule) -> CaptureRecord:
    """Reads Dynamo's record of the graph that it passes to its backend."""
    calls = sum(node.op.startswith("call_") for node in module.graph.nodes)
    end, again = dynamo_capture.find_graph_break(module), dynamo_capture.find_recapture()
    function = _captured_function() or next(
        filter(None, map(outermost_function, module.graph.nodes)), "a graph of no function"
    )
    ended = None if end is None else _break_of(end)
    return CaptureRecord(function, calls, ended, None if again is None else again.reason)


def last_capture(function: str) -> LastCapture | None:
    """The current capture if it is the last that Dynamo's recompile limit allows for the function; else None."""
    again = dynamo_capture.find_recapture()
    if again is None or again.graphs < most_captures():
        return None
    return LastCapture(function, again.graphs, again.reason)


def many_captures(function: str) -> str | None:
    """The warning about a function's 16th capture; None unless the current capture is the 16th and not the last."""
    again = dynamo_capture.find_recapture()
    if again is None or again.graphs != _WARN_AT or again.graphs >= most_captures():
        return None
    return (
        f"Dynamo captured {function} {_WARN_AT} times so far; each takes seconds. The last was captured as others do not fit: "
        f"{again.reason}. A loop over a size that varies is a graph for each size; numbers and words are guarded, too"
    )


def read_capture_seconds() -> float:
    """Seconds since Dynamo began to capture the function whose graph it passes to its backend; 0 outside of Dynamo."""
    began_ns = dynamo_capture.get_capture_start_ns()
    return 0.0 if began_ns is None else (time.time_ns() - began_ns) / 1e9


def breaks_without_graph(captured: Sequence[CaptureRecord]) -> list[GraphBreak]:
    """Graph breaks without a graph, whatever the backend: nothing precedes them, or they are inside of a loop.

    For loops, Dynamo remembers only the last 64 functions it tried.
    """
    known = {capture.ended for capture in captured}
    found = [_break_of(each) for each in dynamo_capture.breaks()]
    for failed in dynamo_capture.failures():
        found.append(GraphBreak(failed.reason, f"{failed.file}:{failed.line} in {failed.function}"))
    return [each for each in dict.fromkeys(found) if each not in known]


def skipped_modules() -> Iterator[nn.Module]:
    """Yields modules that were compiled in place and of which Dynamo captures nothing.

    `module.compile()` compiles torch's `_call_impl`, which Dynamo skips like all code of torch.nn. Dynamo captures the first
    function outside of torch.nn that it calls: the `forward` of the module's class if it is a user's, else that of a
    submodule.
    """
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or modules.compiled_call(each) is None:
            continue
        if not modules.has_hooks(each) and dynamo.is_left_to_python(type(each).forward):
            yield each


def _break_of(found: dynamo_capture.DynamoBreak) -> GraphBreak:
    own = [frame for frame in found.stack if not is_of_library(frame.filename)]
    frames = own or found.stack
    return GraphBreak(found.reason, _format_frame(frames[-1]) if frames else None)


def _format_frame(frame: FrameSummary) -> str:
    place = f"{frame.filename}:{frame.lineno} in {_split_resumed_name(frame.name)[0]}"
    return f"{place}: {frame.line.strip()}" if frame.line else place


def _captured_function() -> str | None:
    """The user's name of the function that Dynamo captures, not that of a wrapper of torch or a library.

    None outside of a call, as in `aot_compile`.
    """
    code = dynamo_capture.captured_code()
    if code is None:
        return None
    wrapped = dynamo_capture.captured_callable()
    if wrapped is not None:
        return _name_callable(wrapped)
    owner, _, name = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    module = dynamo_capture.captured_arguments().get("self")
    if isinstance(module, nn.Module) and not owner:
        return _name_callable(module)
    name, line = _split_resumed_name(name)
    owner = type(module).__name__ if isinstance(module, nn.Module) else owner
    whole = f"{owner}.{name}" if owner else name
    return f"{whole} in {code.co_filename}" + ("" if line is None else f" after line {line}")


def _name_callable(function: Callable[..., object]) -> str:
    """Names a callable for the user: a module by its class and source file, other callables by their names."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    of_module = isinstance(owner, nn.Module)
    name = "forward" if function is owner else getattr(function, "__name__", type(function).__name__)
    whole = f"{type(owner).__name__}.{name}" if of_module else name
    try:
        return f"{whole} in {inspect.getsourcefile(type(owner) if of_module else function)}"
    except (TypeError, OSError):  # written in C, or defined by exec
        return whole


def _split_resumed_name(name: str) -> tuple[str, int | None]:
    """The user's name of a function, and the line after which Dynamo resumes it (None: from its start)."""
    resumed = dynamo_capture.parse_resumed_name(name)
    return (name, None) if resumed is None else resumed
