"""Writes repro scripts of failures: of a native compiler, or of this package on a graph."""

from __future__ import annotations

import hashlib
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from dynaxla.isolation.disk import cache_folders, make_folder, replace_file
from dynaxla.observe.graph_script import MAKE_TENSOR_SOURCE, example_code, find_tensors, graph_script
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

{made}

class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
{attributes}
{forward}


inputs = [
{inputs}]
print(torch.compile(Graph(), backend="dynaxla", options={{"fallback": "error"}})(*inputs))
'''
_COMPARISON = """

if __name__ == "__main__":
    # Lowerings that a process registers (dynaxla.register_lowering) are not in this script: import what registers them.
    from pathlib import Path

    import dynaxla

    held = torch.load(Path(__file__).with_suffix(".pt"))
    graph = Graph(held["tensors"])
    inputs = make_inputs(held["tensors"]) if held["inputs"] is None else held["inputs"]
    print(dynaxla.compare(graph, torch.compile(graph, backend="dynaxla"), *inputs))
"""
_MOST_SAVED = 256 << 20
_CHILDREN = {
    "torch-mlir": "from dynaxla.lowering.torch_mlir_passes import lower\nprint(lower(sys.stdin.buffer.read(), VERSION))",
    "XLA": "from dynaxla.runtime import xla\nprint(xla.compile_module(xla.ModuleRequest(sys.stdin.buffer.read())))",
}


def write_repro(
    compiler: Literal["torch-mlir", "XLA"], module: str, reason: str, version: str = "", folder: Path | None = None
) -> Path:
    """Writes a self-contained script of a compiler's failure; the same failure gives the same file.

    Args:
        compiler: the compiler that fails.
        module: the module's text, in the torch dialect for torch-mlir and in StableHLO for XLA.
        reason: a readable description of the failure.
        version: the StableHLO version that torch-mlir lowers to.
        folder: the script's folder; default: "repros" in the package's cache folder.
    """
    child = _CHILDREN[compiler].replace("VERSION", repr(version))
    said = reason.replace('"""', "'''")
    text = _SCRIPT.format(compiler=compiler, module=module.strip(), reason=said, child=child)
    return _write(text, module, folder)


def write_graph_repro(module: GraphModule, error: BaseException, folder: Path | None = None) -> Path:
    """Writes a script that compiles a graph with inputs of the captured sizes, and raises on any failure.

    All tensors have random values.

    Args:
        module: a graph of Dynamo or AOTAutograd.
        error: the failure, with its traceback.
        folder: as for `write_repro`.
    """
    values = [n.meta.get("val", captured_value(n)) for n in module.graph.nodes if n.op == "placeholder"]
    reason = "".join(traceback.format_exception(error)).replace('"""', "'''")
    text = _GRAPH_SCRIPT.format(
        reason=reason,
        made=MAKE_TENSOR_SOURCE,
        attributes="".join(f"        self.{name} = {example_code(value)}\n" for name, value in find_tensors(module)),
        forward=textwrap.indent(module.code.strip(), "    "),
        inputs="".join(f"    {example_code(value)},\n" for value in values),
    )
    return _write(text, module.code + str(error), folder)


def write_comparison_repro(module: GraphModule, inputs: Sequence[Any], reason: str, folder: Path | None = None) -> Path:
    """Writes a script that compares a graph, compiled, with eager, on the inputs of a call.

    Up to 256 MiB of inputs are written beside it, in a file of torch's; beyond that the script makes random ones.

    Args:
        module: a graph of AOTAutograd on tensors of the host.
        inputs: of the graph; those that it does not read are not written.
        reason: a readable description of the difference.
        folder: as for `write_repro`.
    """
    text, tensors = graph_script(module, (), ())
    placeholders = module.graph.find_nodes(op="placeholder")
    read = [value if node.users else None for node, value in zip(placeholders, inputs, strict=True)]
    size = sum(value.nbytes for value in read if isinstance(value, Tensor))
    path = _write(f"{_comment(reason)}\n{text}{_COMPARISON}", module.code + reason, folder)
    torch.save({"tensors": dict(tensors), "inputs": read if size <= _MOST_SAVED else None}, path.with_suffix(".pt"))
    return path


def _comment(text: str) -> str:
    return textwrap.indent(text, "# ", lambda line: True)


def _write(text: str, key: str, folder: Path | None) -> Path:
    """Writes one file per failure, atomically: it is written under another name, then renamed."""
    folder = folder or cache_folders().own / "repros"
    make_folder(folder)
    path = folder / f"repro_{hashlib.sha256(key.encode()).hexdigest()[:16]}.py"
    replace_file(path, [text.encode()])
    return path
