"""Where Dynamo ended its graphs and why, read from Dynamo's own records; once per graph, never per call."""

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
from dynaxla.torch_api import dynamo, modules
from dynaxla.torch_api import dynamo_capture as capturing
from dynaxla.torch_api.capture_limit import most_captures

_MANY = 16


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
class Capture:
    """A graph that Dynamo captured.

    Attributes:
        function: the function that it is of, a module's by the module's class, and the line after which it begins where an
            earlier graph ended.
        calls: how many calls are in it.
        ended: why it ended; None if it ended with the function.
    """

    function: str
    calls: int
    ended: GraphBreak | None = None

    def __str__(self) -> str:
        what = f"{self.function}: {self.calls} {'call' if self.calls == 1 else 'calls'}"
        return what if self.ended is None else f"{what}; ends early: {self.ended}"


@dataclass(frozen=True, slots=True)
class LastCapture:
    """A function that Dynamo has captured as often as its recompile limit allows.

    Attributes:
        function: as in `Capture`.
        count: how often.
        reason: Dynamo's own, of this capture: which of a graph's guards failed.
    """

    function: str
    count: int
    reason: str

    def __str__(self) -> str:
        return (
            f"Dynamo captured {self.function} {self.count} times, as often as its limit lets it: calls that none of these "
            f"graphs is for run in eager PyTorch from now on. The last was captured as others do not fit: {self.reason}. Mark "
            f"the sizes that vary at the first call (dynaxla.mark_bucketed), or set torch._dynamo.config.recompile_limit higher"
        )


def capture_of(module: GraphModule) -> Capture:
    """Reads Dynamo's record of the graph that it is handing to its backend."""
    calls = sum(node.op.startswith("call_") for node in module.graph.nodes)
    end = capturing.end_of(module)
    function = _captured_function() or next(
        filter(None, map(outermost_function, module.graph.nodes)), "a graph of no function"
    )
    return Capture(function, calls, None if end is None else _break_of(end))


def last_capture(function: str) -> LastCapture | None:
    """The current capture, if it is the last one that Dynamo's recompile limit allows of the function; else None."""
    again = capturing.recapture()
    if again is None or again.graphs < most_captures():
        return None
    return LastCapture(function, again.graphs, again.reason)


def many_captures(function: str) -> str | None:
    """The warning about a function's 16th capture, if the current one is that and not the last; else None."""
    again = capturing.recapture()
    if again is None or again.graphs != _MANY or again.graphs >= most_captures():
        return None
    return (
        f"Dynamo captured {function} {_MANY} times so far; each takes seconds. The last was captured as others do not fit: "
        f"{again.reason}. A loop over a size that varies is a graph for each size; numbers and words are guarded, too"
    )


def seconds_of_capture() -> float:
    """Seconds since Dynamo began to capture the function whose graph it is handing to its backend; 0 outside of Dynamo."""
    began_ns = capturing.began_at_ns()
    return 0.0 if began_ns is None else (time.time_ns() - began_ns) / 1e9


def breaks_without_graph(captured: Sequence[Capture]) -> list[GraphBreak]:
    """Graph breaks that left nothing to compile, with any backend: nothing came before them, or they are inside of a loop.

    Of the latter Dynamo knows those among the last 64 functions it tried.
    """
    known = {capture.ended for capture in captured}
    found = [_break_of(each) for each in capturing.breaks()]
    for failed in capturing.failures():
        found.append(GraphBreak(failed.reason, f"{failed.file}:{failed.line} in {failed.function}"))
    return [each for each in dict.fromkeys(found) if each not in known]


def skipped_modules() -> Iterator[nn.Module]:
    """Modules that were compiled in place and of which Dynamo captures nothing, whoever calls them.

    `module.compile()` compiles torch's own `_call_impl`, which Dynamo leaves to Python like all code of torch.nn; it begins
    with the first code of another's that this calls: the module's `forward` if its class has one of its own, else that of a
    module within.
    """
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or modules.compiled_call(each) is None:
            continue
        if not modules.has_hooks(each) and dynamo.is_left_to_python(type(each).forward):
            yield each


def _break_of(found: capturing.Break) -> GraphBreak:
    own = [frame for frame in found.stack if not is_of_library(frame.filename)]
    frames = own or found.stack
    return GraphBreak(found.reason, _place(frames[-1]) if frames else None)


def _place(frame: FrameSummary) -> str:
    place = f"{frame.filename}:{frame.lineno} in {_named(frame.name)[0]}"
    return f"{place}: {frame.line.strip()}" if frame.line else place


def _captured_function() -> str | None:
    """The function that Dynamo is at, named for the user: not as the wrapper that torch or a library puts around it.

    None outside of a call, as in `aot_compile`.
    """
    code = capturing.captured_code()
    if code is None:
        return None
    wrapped = capturing.captured_callable()
    if wrapped is not None:
        return _of_callable(wrapped)
    owner, _, name = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    module = capturing.captured_arguments().get("self")
    if isinstance(module, nn.Module) and not owner:
        return _of_callable(module)
    name, line = _named(name)
    owner = type(module).__name__ if isinstance(module, nn.Module) else owner
    whole = f"{owner}.{name}" if owner else name
    return f"{whole} in {code.co_filename}" + ("" if line is None else f" after line {line}")


def _of_callable(function: Callable[..., object]) -> str:
    """A module by its class, and where that is written; other callables as they are named."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    of_module = isinstance(owner, nn.Module)
    name = "forward" if function is owner else getattr(function, "__name__", type(function).__name__)
    whole = f"{type(owner).__name__}.{name}" if of_module else name
    try:
        return f"{whole} in {inspect.getsourcefile(type(owner) if of_module else function)}"
    except (TypeError, OSError):  # it is written in C, or made by exec
        return whole


def _named(name: str) -> tuple[str, int | None]:
    """The user's name of a function, and the line after which Dynamo goes on with it."""
    resumed = capturing.resumed_in(name)
    return (name, None) if resumed is None else resumed
