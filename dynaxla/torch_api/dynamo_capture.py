"""Dynamo at work: the function that it captures, and why a graph ended. Outside of a capture there is nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from types import CodeType
from typing import Any

from torch._dynamo import utils
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule

from dynaxla.torch_api.frames import variables_of

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")
_EXPLANATION = re.compile(r"\n\s*Explanation: (?P<text>[^\n]+)")
_JUMP = "generic_jump"  # Dynamo's word for an `if` or a `while` on a tensor


@dataclass(frozen=True, slots=True)
class Break:
    """Why Dynamo ended a graph.

    Attributes:
        reason: in one line.
        stack: where, the user's frames and those of libraries, outermost first.
    """

    reason: str
    stack: Sequence[FrameSummary]


@dataclass(frozen=True, slots=True)
class Failure:
    """A function of which Dynamo captured nothing, as it met what it does not know.

    Attributes:
        reason: in one line.
        file, line, function: where.
    """

    reason: str
    file: str | None
    line: int | None
    function: str | None


@dataclass(frozen=True, slots=True)
class Recapture:
    """A function that is captured once more.

    Attributes:
        graphs: how many captures of it there are, this one included.
        reason: of this capture: which guard failed.
    """

    graphs: int
    reason: str


def end_of(module: GraphModule) -> Break | None:
    """Why a graph that Dynamo hands to its backend ended before its function did; None if it did not.

    Relies on the graph's attribute `compile_subgraph_reason`, which pieces of graphs that others cut do not have.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    return _break(reason) if reason is not None and reason.graph_break else None


def breaks() -> list[Break]:
    """All breaks since the process began, or `torch._dynamo.reset`. Relies on `torch._dynamo.utils.graph_break_reasons`."""
    return [_break(reason) for reason in utils.graph_break_reasons]


def failures() -> Iterator[Failure]:
    """Of the last 64 functions that Dynamo tried, those that it left to eager as a whole.

    Relies on `torch._dynamo.utils.get_compilation_metrics` and on the name of Dynamo's exception, Unsupported.
    """
    for tried in utils.get_compilation_metrics():
        if tried.fail_type == "Unsupported" and tried.fail_reason:
            reason = in_one_line(tried.fail_reason)
            yield Failure(reason, tried.fail_user_frame_filename, tried.fail_user_frame_lineno, tried.co_name)


def recapture() -> Recapture | None:
    """What there is to say of the capture at hand if the function was captured before.

    Relies on the variables `cache_size` and `recompile_reason` of the running `torch._dynamo.convert_frame._compile`.
    """
    variables = _compiling()
    size, reason = variables.get("cache_size"), variables.get("recompile_reason")
    if size is None or reason is None:
        return None
    return Recapture(size.num_cache_entries_with_same_id_matched_objs + 1, reason.partition("\n")[0])


def began_at_ns() -> int | None:
    """When the capture at hand began, as `time.time_ns` counts; None outside of one.

    Relies on the variable `start_time_ns` of the running `torch._dynamo.convert_frame._compile`.
    """
    return _compiling().get("start_time_ns")


def captured_code() -> CodeType | None:
    """The code of the function that is captured, not of one that it calls; None outside of a capture.

    Relies on `InstructionTranslator.current_tx().output.root_tx`.
    """
    frame = _function()
    return None if frame is None else frame.f_code  # type: ignore[no-any-return]


def captured_arguments() -> Mapping[str, Any]:
    """The captured function's arguments by name, `self` included."""
    frame = _function()
    return {} if frame is None else frame.f_locals


def captured_callable() -> Any:
    """What the function that is captured was put around by torch, or None.

    Relies on `wrap_inline` of torch._dynamo.external_utils: its `inner`, which calls its variable `fn`.
    """
    code, given = captured_code(), captured_arguments()
    return given.get("fn") if code is not None and code.co_qualname == "wrap_inline.<locals>.inner" else None


def captured_for() -> Any:
    """The backend object, as `torch.compile` made it, that the graph is captured for; None outside of a capture.

    Relies on `output.compiler_fn` of the translator, and on `innermost_backend`, which takes Dynamo's wrappers off.
    """
    translator = _translator()
    backend = None if translator is None else translator.output.compiler_fn
    return None if backend is None else innermost_backend(backend)


def resumed_in(name: str) -> tuple[str, int] | None:
    """The function and the line after which Dynamo goes on with it, for the name of a function of Dynamo's making."""
    found = _RESUMED.fullmatch(name)
    return None if found is None else (found["function"], int(found["line"]))


def in_one_line(reason: str) -> str:
    """The headline and the explanation of Dynamo's message, without hints and links.

    Relies on how `torch._dynamo.exc.format_graph_break_message` lays it out, and on the word for a jump on a tensor.
    """
    headline = reason.partition("\n")[0].strip()
    if headline.startswith(_JUMP):
        return "the program goes on by a tensor's value, which is known only when it runs"
    explanation = _EXPLANATION.search(reason)
    return f"{headline}: {explanation['text'].strip()}" if explanation else headline


def _break(reason: Any) -> Break:
    return Break(in_one_line(reason.reason), tuple(reason.user_stack))


def _compiling() -> Mapping[str, Any]:
    return variables_of("_compile", "torch._dynamo.convert_frame") or {}


def _translator() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # torch keeps it in a thread-local variable, which begins without
        return None


def _function() -> Any:
    """The function that is captured, in Dynamo's hands: its code and its variables at the beginning."""
    translator = _translator()
    return None if translator is None else translator.output.root_tx
