"""Where in the user's program the calls of a module come from, as MLIR's locations: XLA keeps them as metadata of its
instructions, and profiles show them.

The location of call 12 is `loc("layers.0.attention/addmm.12"("model.py":40:0))`, and XLA gives it to what the function's body
becomes. The number names the call within its graph (`find_call`), also in an executable that another process compiled of an
equal graph; the file and the line are those of that process's program.
"""

from __future__ import annotations

import json
import re

from torch.fx import Node

from dynaxla.diagnostics import source_line
from dynaxla.lowering.call_graph import CallGraph, Handle, OpCall
from dynaxla.torch_api.overloads import stable_name
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


def _locate(number: int, handle: Handle, call: OpCall) -> str:
    meta = handle.meta if isinstance(handle, Node) else {}
    op = stable_name(call.target).split(".")[-2 if "." in stable_name(call.target) else 0]
    path = meta.get(MODULE_PATH, "")
    name = json.dumps(f"{path}/{op}.{number}" if path else f"{op}.{number}")
    line = source_line(handle) if isinstance(handle, Node) else None
    return name if line is None else f"{name}({json.dumps(line.file)}:{line.line}:0)"
