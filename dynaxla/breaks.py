"""Where Dynamo ended its graphs and why, as Dynamo itself remembers it; read once per graph, never per call."""

from __future__ import annotations

import gc
import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

from torch import nn
from torch._dynamo import config, trace_rules
from torch._dynamo import utils as dynamo
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule

from dynaxla.reasons import is_of_library

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")
_EXPLANATION = re.compile(r"\n\s*Explanation: (?P<text>[^\n]+)")
_JUMP = "generic_jump"  # Dynamo's word for an `if` or a `while` on a tensor


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why a graph ended before its function did.

    Attributes:
        reason: Dynamo's own, in one line.
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
    """A function that Dynamo captured as often as it will.

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
            f"Dynamo captured {self.function} {self.count} times, as often as torch._dynamo.config.recompile_limit lets it: "
            f"calls that none of these graphs is for run in eager PyTorch from now on. The last was captured as others do "
            f"not fit: {self.reason}. Mark the sizes that vary at the first call (dynaxla.mark_bucketed), or raise that limit"
        )


def capture_of(module: GraphModule) -> Capture:
    """What Dynamo says of a graph that it hands to its backend."""
    calls = sum(node.op.startswith("call_") for node in module.graph.nodes)
    reason = getattr(module, "compile_subgraph_reason", None)  # pieces of graphs that others cut have none
    ended = _break_of(reason) if reason is not None and reason.graph_break else None
    return Capture(_function_in_translation(), calls, ended)


def last_capture(function: str) -> LastCapture | None:
    """What there is to say of the capture that Dynamo is at if it is the function's last; None if it may make more."""
    compiling = _dynamo_compiling()
    size, reason = compiling.get("cache_size"), compiling.get("recompile_reason")
    if size is None or reason is None:
        return None
    count = size.num_cache_entries_with_same_id_matched_objs + 1
    return LastCapture(function, count, reason.partition("\n")[0]) if count >= config.recompile_limit else None


def seconds_of_capture() -> float:
    """How long Dynamo has been at the function whose graph it hands to its backend; 0 outside of Dynamo."""
    began_ns = _dynamo_compiling().get("start_time_ns")
    return 0.0 if began_ns is None else (time.time_ns() - began_ns) / 1e9


def _dynamo_compiling() -> Mapping[str, Any]:
    """What Dynamo knows of the function whose graph it hands to its backend; nothing outside of Dynamo."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals["__name__"] == "torch._dynamo.convert_frame":
            return frame.f_locals
        frame = frame.f_back
    return {}


def breaks_without_graph(captured: Sequence[Capture]) -> list[GraphBreak]:
    """Breaks that left nothing to compile, of whatever backend: nothing came before them, or they lie inside of a loop.

    Of the latter Dynamo knows those among the last 64 functions it tried.
    """
    known = {capture.ended for capture in captured}
    found = [_break_of(reason) for reason in dynamo.graph_break_reasons]
    for tried in dynamo.get_compilation_metrics():
        if tried.fail_type == "Unsupported" and tried.fail_reason:
            place = f"{tried.fail_user_frame_filename}:{tried.fail_user_frame_lineno} in {tried.co_name}"
            found.append(GraphBreak(_in_one_line(tried.fail_reason), place))
    return [each for each in dict.fromkeys(found) if each not in known]


def skipped_modules() -> Iterator[nn.Module]:
    """Modules that were compiled in place and of which Dynamo captures nothing, whoever calls them.

    `module.compile()` compiles torch's own `_call_impl`, which Dynamo leaves to Python like all code of torch.nn; it begins
    with the first code of another's that this calls: the module's `forward` if its class has one of its own, else that of a
    module within.
    """
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and getattr(each, "_compiled_call_impl", None) is not None:
            hooked = each._forward_hooks or each._forward_pre_hooks
            if not hooked and trace_rules.check(type(each).forward):
                yield each


def _break_of(reason: Any) -> GraphBreak:
    own = [frame for frame in reason.user_stack if not is_of_library(frame.filename)]
    frame = (own or reason.user_stack or [None])[-1]
    return GraphBreak(_in_one_line(reason.reason), None if frame is None else _place(frame))


def _in_one_line(reason: str) -> str:
    """The headline and the explanation, without hints and links."""
    headline = reason.partition("\n")[0].strip()
    if headline.startswith(_JUMP):
        return "the program goes on by a tensor's value, which is known only when it runs"
    explanation = _EXPLANATION.search(reason)
    return f"{headline}: {explanation['text'].strip()}" if explanation else headline


def _place(frame: FrameSummary) -> str:
    place = f"{frame.filename}:{frame.lineno} in {_named(frame.name)[0]}"
    return f"{place}: {frame.line.strip()}" if frame.line else place


def _function_in_translation() -> str:
    """The function that Dynamo is at, named for the user: not as the wrapper that torch or a library puts around it."""
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # torch keeps it in a thread-local variable, which begins without
        return "a graph of no function"
    code, given = frame.f_code, frame.f_locals
    if "fn" in given and code.co_qualname == "wrap_inline.<locals>.inner":
        return _of_callable(given["fn"])
    owner, _, name = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    module = given.get("self")
    if isinstance(module, nn.Module) and not owner:
        return _of_callable(module)
    name, line = _named(name)
    owner = type(module).__name__ if isinstance(module, nn.Module) else owner
    whole = f"{owner}.{name}" if owner else name
    return f"{whole} in {code.co_filename}" + ("" if line is None else f" after line {line}")


def _of_callable(function: Any) -> str:
    """A module by its class, and where that is written; other callables as they are named."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    of_module = isinstance(owner, nn.Module)
    name = "forward" if function is owner else getattr(function, "__name__", type(function).__name__)
    whole = f"{type(owner).__name__}.{name}" if of_module else name
    try:
        return f"{whole} in {inspect.getsourcefile(type(owner) if of_module else function)}"
    except (TypeError, OSError):  # it is written in C, or made by exec
        return whole


def _named(name: str) -> tuple[str, str | None]:
    """The user's name of a function, and the line after which Dynamo goes on with it."""
    resumed = _RESUMED.fullmatch(name)
    return (name, None) if resumed is None else (resumed["function"], resumed["line"])
