"""Where in the user's program the calls of a module come from, as MLIR's locations: XLA keeps them as metadata of its
instructions, and profiles show them.

The location of call 12 is `loc("layers.0.attention/addmm.12"("model.py":40:0))`, and XLA gives it to what the function's body
becomes. The number names the call within its graph (`find_call`), also in an executable that another process compiled of an
equal graph; the file and the line are those of that process's program.
"""

from __future__ import annotations

import re

from torch.fx import Node

from dynaxla.diagnostics import source_line
from dynaxla.lowering.call_graph import CallGraph, Handle, OpCall
from dynaxla.torch_api.overloads import OpOverload, stable_name
from dynaxla.types import MODULE_PATH

_NUMBER = re.compile(r"\.(\d+)$")


def define_locations(graph: CallGraph) -> str:
    """The definitions of the locations of a graph's calls, by their numbers."""
    return "".join(
        f"#call{number} = loc({_locate(number, handle, call)})\n"
        for number, (handle, (call, _)) in enumerate(graph.calls.items())
    )


def find_call(name: str) -> int | None:
    """The number of the call that an instruction of XLA comes from, by the `op_name` of its metadata; None for others."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def shorten_op(target: OpOverload) -> str:
    """ "addmm" of aten.addmm.default."""
    return stable_name(target).split(".")[-2 if "." in stable_name(target) else 0]


def _locate(number: int, handle: Handle, call: OpCall) -> str:
    meta = handle.meta if isinstance(handle, Node) else {}
    op = shorten_op(call.target)
    path = meta.get(MODULE_PATH, "")
    name = _quote(f"{path}/{op}.{number}" if path else f"{op}.{number}")
    line = source_line(handle) if isinstance(handle, Node) else None
    return name if line is None else f"{name}({_quote(line.file)}:{line.line}:0)"


def _quote(text: str) -> str:
    """MLIR's literal of a text: bytes that are no printable ASCII are two hex digits behind a backslash."""
    safe = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in text.encode(errors="replace"))
    return f'"{"".join(safe)}"'
