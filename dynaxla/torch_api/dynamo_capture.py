"""The function that Dynamo is capturing, and the reasons why graphs ended. Outside of a capture the functions return None."""

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
_JUMP = "generic_jump"  # how Dynamo's message names an `if` or a `while` on a tensor


@dataclass(frozen=True, slots=True)
class DynamoBreak:
    """The reason why Dynamo ended a graph.

    Attributes:
        reason: the reason, in one line.
        stack: the frames of the user and of libraries at the break, outermost first.
    """

    reason: str
    stack: Sequence[FrameSummary]


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """A function that Dynamo runs entirely in eager, because it contains something unsupported.

    Attributes:
        reason: the reason, in one line.
        file, line, function: where the unsupported code is.
    """

    reason: str
    file: str | None
    line: int | None
    function: str | None


@dataclass(frozen=True, slots=True)
class Recapture:
    """A further capture of a function.

    Attributes:
        graphs: number of captures of the function, this one included.
        reason: the guard whose failure caused this capture.
    """

    graphs: int
    reason: str


def find_graph_break(module: GraphModule) -> DynamoBreak | None:
    """Returns why Dynamo ended a graph before its function returned; None if it did not.

    Relies on the graph's attribute `compile_subgraph_reason`, which graphs split by other code do not have.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    return _break(reason) if reason is not None and reason.graph_break else None


def breaks() -> list[DynamoBreak]:
    """Returns all graph breaks since the process started or `torch._dynamo.reset` was called. Relies on
    `torch._dynamo.utils.graph_break_reasons`."""
    return [_break(reason) for reason in utils.graph_break_reasons]


def failures() -> Iterator[CaptureFailure]:
    """Yields the functions, of the last 64 that Dynamo tried, that it runs entirely in eager.

    Relies on `torch._dynamo.utils.get_compilation_metrics` and on the name of Dynamo's exception, Unsupported.
    """
    for tried in utils.get_compilation_metrics():
        if tried.fail_type == "Unsupported" and tried.fail_reason:
            reason = shorten_message(tried.fail_reason)
            yield CaptureFailure(reason, tried.fail_user_frame_filename, tried.fail_user_frame_lineno, tried.co_name)


def find_recapture() -> Recapture | None:
    """Returns the count and the reason of the current capture if the function was captured before; else None.

    Relies on the variables `cache_size` and `recompile_reason` of the running `torch._dynamo.convert_frame._compile`.
    """
    variables = _compiling()
    size, reason = variables.get("cache_size"), variables.get("recompile_reason")
    if size is None or reason is None:
        return None
    return Recapture(size.num_cache_entries_with_same_id_matched_objs + 1, reason.partition("\n")[0])


def get_capture_start_ns() -> int | None:
    """Returns when the current capture began, in `time.time_ns`; None outside of a capture.

    Relies on the variable `start_time_ns` of the running `torch._dynamo.convert_frame._compile`.
    """
    return _compiling().get("start_time_ns")


def captured_code() -> CodeType | None:
    """Returns the code of the function being captured, not of a function that it calls; None outside of a capture.

    Relies on `InstructionTranslator.current_tx().output.root_tx`.
    """
    frame = _function()
    return None if frame is None else frame.f_code  # type: ignore[no-any-return]


def captured_arguments() -> Mapping[str, Any]:
    """Returns the captured function's arguments by name, `self` included."""
    frame = _function()
    return {} if frame is None else frame.f_locals


def captured_callable() -> Any:
    """Returns the function that torch wrapped to make the function being captured, or None.

    Relies on `wrap_inline` of torch._dynamo.external_utils: its `inner`, which calls its variable `fn`.
    """
    code, given = captured_code(), captured_arguments()
    return given.get("fn") if code is not None and code.co_qualname == "wrap_inline.<locals>.inner" else None


def get_capturing_backend() -> Any:
    """Returns the backend object, made by `torch.compile`, for which Dynamo captures; None outside of a capture.

    Relies on `output.compiler_fn` of the translator, and on `innermost_backend`, which removes Dynamo's wrappers.
    """
    translator = _translator()
    backend = None if translator is None else translator.output.compiler_fn
    return None if backend is None else innermost_backend(backend)


def parse_resumed_name(name: str) -> tuple[str, int] | None:
    """Returns the user's function, and the line after which it resumes, for the name of a resume function; else None."""
    found = _RESUMED.fullmatch(name)
    return None if found is None else (found["function"], int(found["line"]))


def shorten_message(reason: str) -> str:
    """Returns the headline and the explanation of a message of Dynamo, without hints and links.

    Relies on the layout of `torch._dynamo.exc.format_graph_break_message`, and on the word for a jump on a tensor.
    """
    headline = reason.partition("\n")[0].strip()
    if headline.startswith(_JUMP):
        return "the program goes on by a tensor's value, which is known only when it runs"
    explanation = _EXPLANATION.search(reason)
    return f"{headline}: {explanation['text'].strip()}" if explanation else headline


def _break(reason: Any) -> DynamoBreak:
    return DynamoBreak(shorten_message(reason.reason), tuple(reason.user_stack))


def _compiling() -> Mapping[str, Any]:
    return variables_of("_compile", "torch._dynamo.convert_frame") or {}


def _translator() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # torch has it in a thread-local variable, which starts empty
        return None


def _function() -> Any:
    """Returns Dynamo's translator of the function being captured: its code, and its variables at entry."""
    translator = _translator()
    return None if translator is None else translator.output.root_tx
