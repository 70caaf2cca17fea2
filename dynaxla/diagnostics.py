"""The reasons why ops run in eager PyTorch, as data for logs, tests and reports."""

from __future__ import annotations

import enum
import re
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch


class ReasonId(enum.Enum):
    """Stable identifiers of reasons; tests and tools compare these, never the text."""

    NO_LOWERING = "no_lowering"
    UNSUPPORTED_CALL = "unsupported_call"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_TENSOR = "unsupported_tensor"
    DATA_DEPENDENT = "data_dependent"
    READS_VALUE = "reads_value"
    CUSTOM_OP = "custom_op"
    RANDOM = "random"
    HIGHER_ORDER = "higher_order_op"
    SIDE_EFFECT = "side_effect"
    LOWERING_FAILED = "lowering_failed"
    LOWERING_CRASHED = "lowering_crashed"
    LOWERING_TIMEOUT = "lowering_timeout"
    LOWERING_OUT_OF_MEMORY = "lowering_out_of_memory"
    LOWERING_UNAVAILABLE = "lowering_unavailable"
    LINK_FAILED = "link_failed"
    MISPREDICTED = "mispredicted"
    COMPILE_FAILED = "compile_failed"
    COMPILE_CRASHED = "compile_crashed"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILE_OUT_OF_MEMORY = "compile_out_of_memory"
    COMPILE_UNAVAILABLE = "compile_unavailable"
    INTERNAL_ERROR = "internal_error"


class EagerRefusal(Exception):
    """Eager PyTorch raises for a call's arguments. Raised by what replaces the call in a graph, which then runs in eager."""


@dataclass(frozen=True, slots=True)
class FallbackReason:
    """The reason why one op runs in eager.

    Attributes:
        id: the kind of reason.
        op: the overload, such as "aten.nonzero.default"; for an internal error, the graph that caused it.
        dtypes: dtypes of its operands and results, without "torch.".
        frame: the user's source line, or None.
        hint: what the user can do about it.
        detail: details of this case; may be empty.
        repro: path of a script that reproduces the failure, or None.
    """

    id: ReasonId
    op: str
    dtypes: tuple[str, ...] = ()
    frame: str | None = None
    hint: str = ""
    detail: str = ""
    repro: str | None = None

    def __str__(self) -> str:
        dtypes = f" ({', '.join(self.dtypes)})" if self.dtypes else ""
        parts = [f"{self.op}{dtypes} runs in eager PyTorch: {self.id.value}"]
        parts += [self.detail] if self.detail else []
        parts += [f"at {self.frame}"] if self.frame else []
        parts += [self.hint] if self.hint else []
        parts += [f"repro: {self.repro}"] if self.repro else []
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class ExactShape:
    """The reason why a part is compiled once per exact shape instead of once per bucket.

    Attributes:
        op: the overload that would read padding, such as "aten.var.correction".
        detail: the effect of padding on it.
        frame: the user's source line, or None.
    """

    op: str
    detail: str
    frame: str | None = None

    def __str__(self) -> str:
        where = f"; at {self.frame}" if self.frame else ""
        return f"{self.op} cannot run on padded values, so its part is compiled per exact shape: {self.detail}{where}"


@dataclass(frozen=True, slots=True)
class ManyPrograms:
    """A graph part, or an op, with unexpectedly many programs, and their common reason.

    Attributes:
        count: number of its programs.
        reason: why it has so many.
        varies: the sizes that varied, with their values.
        hint: what the user can do about it.
        what: name of the part or op for the user.
    """

    count: int
    reason: str
    varies: str
    hint: str
    what: str = "a graph part"

    def __str__(self) -> str:
        return f"{self.what} has {self.count} programs: {self.reason}; what varies: {self.varies}. {self.hint}"


# A frame without available source (code run by exec) has no code line: the next frame follows at once.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?'
)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's program.

    Attributes:
        file: its path.
        line: its number, from 1.
        function: the function that it is in.
        code: its text; may be empty.
    """

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line} in {self.function}"
        return f"{place}: {self.code}" if self.code else place


def user_frame(node: torch.fx.Node) -> str | None:
    """Returns the line of `source_line` as text."""
    line = source_line(node)
    return None if line is None else str(line)


def source_line(node: torch.fx.Node) -> SourceLine | None:
    """Returns the innermost source line of the node's trace outside installed libraries, else the innermost line."""
    return _innermost(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _innermost(trace: str) -> SourceLine | None:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return None
    own = [f for f in frames if not is_of_library(f["file"])]
    found = (own or frames)[-1]
    return SourceLine(found["file"], int(found["line"]), found["function"], (found["code"] or "").strip())


def outermost_function(node: torch.fx.Node) -> str | None:
    """Returns the outermost function of a node's trace, and its file; None without a trace."""
    frame = _FRAME.search(node.meta.get("stack_trace") or "")
    return None if frame is None else f"{frame['function']} in {frame['file']}"


@lru_cache(maxsize=4096)
def is_of_library(file: str) -> bool:
    """Whether a source file belongs to Python or to an installed package."""
    libraries = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
    return any(Path(file).is_relative_to(library) for library in libraries)
