"""Scripts that show a failure on its own: of a native compiler, or of this package on a graph."""

from __future__ import annotations

import hashlib
import os
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import platformdirs
import torch
from torch.fx import GraphModule

from dynaxla.torch_api import symbols
from dynaxla.torch_api.fakes import captured_value

_SCRIPT = '''r"""Shows how {compiler} fails.

{reason}

Run it with the Python that has dynaxla: it gives {compiler} the module below in a child process and prints what happens.
"""

import subprocess
import sys

MODULE = r"""
{module}
"""

CHILD = """
import sys
{child}
"""

done = subprocess.run([sys.executable, "-c", CHILD], input=MODULE.encode(), capture_output=True)
print(done.stdout.decode()[-4000:])
print(done.stderr.decode()[-4000:])
print("exit status", done.returncode)
'''
_GRAPH_SCRIPT = '''r"""Compiles a graph on which dynaxla failed; run it with the Python that has dynaxla.

{reason}
"""

import torch
from torch import device, inf, nan, tensor  # as the graph's code names them

import dynaxla


def made(sizes, strides, dtype, device, requires_grad):
    values = torch.rand(sizes, device=device).mul(3).to(dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).copy_(values).requires_grad_(requires_grad)


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
{attributes}
{forward}


inputs = [
{inputs}]
print(torch.compile(Graph(), backend="dynaxla", options={{"fallback": "error"}})(*inputs))
'''
_CHILDREN = {
    "torch-mlir": "from dynaxla.lowering import passes\nprint(passes.lower(sys.stdin.buffer.read(), VERSION))",
    "XLA": "from dynaxla.runtime import xla\nprint(xla.compile_module(sys.stdin.buffer.read()))",
}


def write_repro(
    compiler: Literal["torch-mlir", "XLA"], module: str, reason: str, version: str = "", folder: Path | None = None
) -> Path:
    """Writes a self-contained script; the same failure gives the same file.

    Args:
        compiler: which one fails.
        module: text, in the torch dialect for torch-mlir and in StableHLO for XLA.
        reason: what happened, readable.
        version: the StableHLO version that torch-mlir lowers to.
        folder: default: "repros" in the user's cache folder of this package.
    """
    child = _CHILDREN[compiler].replace("VERSION", repr(version))
    said = reason.replace('"""', "'''")
    text = _SCRIPT.format(compiler=compiler, module=module.strip(), reason=said, child=child)
    return _write(text, module, folder)


def write_graph_repro(module: GraphModule, error: BaseException, folder: Path | None = None) -> Path:
    """Writes a script that compiles a graph, on inputs like those that it was captured for, where any fault is an error.

    All tensors have random values.

    Args:
        module: a graph of Dynamo's or AOTAutograd's.
        error: what happened, with its traceback.
        folder: as for `write_repro`.
    """
    values = [n.meta.get("val", captured_value(n)) for n in module.graph.nodes if n.op == "placeholder"]
    reason = "".join(traceback.format_exception(error)).replace('"""', "'''")
    text = _GRAPH_SCRIPT.format(
        reason=reason,
        attributes="".join(f"        self.{name} = {_made(value)}\n" for name, value in _tensors_of(module)),
        forward=textwrap.indent(module.code.strip(), "    "),
        inputs="".join(f"    {_made(value)},\n" for value in values),
    )
    return _write(text, module.code + str(error), folder)


def _tensors_of(module: GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    """What a graph's code reads from its module, if it is a tensor."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor):
            yield str(node.target), value


def _made(value: Any) -> str:
    """Code that makes a value like this one; sizes that vary are those of the first call."""
    if not isinstance(value, torch.Tensor):
        return repr(symbols.example(value))
    if value.layout is not torch.strided or value.is_nested:
        return repr(f"{value.layout} {value.dtype}")
    sizes, strides = (list(map(symbols.example, numbers)) for numbers in (value.shape, value.stride()))
    return f"made({sizes}, {strides}, {value.dtype}, {str(value.device)!r}, requires_grad={value.requires_grad})"


def _write(text: str, key: str, folder: Path | None) -> Path:
    """One file per failure. A reader never sees half a script: it is written aside, then renamed."""
    folder = folder or platformdirs.user_cache_path("dynaxla") / "repros"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"repro_{hashlib.sha256(key.encode()).hexdigest()[:16]}.py"
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, path)
    return path
