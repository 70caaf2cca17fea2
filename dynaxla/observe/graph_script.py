"""Writes graphs as Python scripts that eager PyTorch runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from dynaxla.torch_api import symbols
from dynaxla.torch_api.fakes import FakeTensor, find_opaque_class

MAKE_TENSOR_SOURCE = """
def made(sizes, strides, dtype, device, requires_grad=False):
    values = torch.rand(sizes, device=device).mul(3).to(dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).copy_(values).requires_grad_(requires_grad)
"""
"""Source of a function that makes a tensor of random values from 0 to 3."""

_SCRIPT = '''"""A graph after a pass; `python -m dynaxla.observe.compare_passes` on this folder compares it with the
one before."""

import torch
import torch.fx._pytree as fx_pytree
from torch import device, inf, nan
from torch.utils import _pytree as pytree

import dynaxla.custom_ops.internal
from dynaxla.custom_ops.threefry import new_seed
{imports}
{made}

{graph}


def make_inputs(tensors):
    """Returns random inputs of the captured sizes; `tensors` are the graph's tensors, by name."""
    return [
{inputs}    ]


def run(tensors):
    """Returns the outputs for random inputs."""
    return Graph(tensors)(*make_inputs(tensors))
'''


def graph_script(
    module: GraphModule, constants: Sequence[torch.Tensor], seeds: Sequence[torch.device]
) -> tuple[str, Mapping[str, torch.Tensor]]:
    """Returns a script whose `run` returns a graph's outputs, and the tensors that `run` takes.

    Args:
        module: a graph of AOTAutograd. Every node's line in the script has its size and dtype; inputs have the sizes of the
            first call.
        constants: the values of its last inputs.
        seeds: the devices of the seeds, which are the inputs before the constants.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    given = len(nodes) - len(constants) - len(seeds)
    lines = [
        *(example_code(node.meta["val"]) for node in nodes[:given]),
        *(f"new_seed(device({str(seed)!r}))" for seed in seeds),
        *(f"tensors[{node.name!r}]" for node in nodes[given + len(seeds) :]),
    ]
    tensors: dict[str, torch.Tensor] = {}
    imports: dict[str, None] = {}
    graph = _class(module, "Graph", "", tensors, imports)
    tensors |= {node.name: value for node, value in zip(nodes[given + len(seeds) :], constants, strict=True)}
    inputs = "".join(f"        {line},\n" for line in lines)
    return _SCRIPT.format(imports="\n".join(imports), made=MAKE_TENSOR_SOURCE, graph=graph, inputs=inputs), tensors


def example_code(value: Any) -> str:
    """Source that makes a random value of the same kind; symbolic sizes have their values of the first call.

    Of an object that is no tensor and no number it is the name of its class, as a text.
    """
    if (name := find_opaque_class(value)) is not None:
        return repr(name)
    if not isinstance(value, torch.Tensor):
        return repr(symbols.example(value))
    if value.layout is not torch.strided or value.is_nested:
        return repr(f"{value.layout} {value.dtype}")
    sizes, strides = (list(map(symbols.example, numbers)) for numbers in (value.shape, value.stride()))
    return f"made({sizes}, {strides}, {value.dtype}, {str(value.device)!r}, requires_grad={value.requires_grad})"


def find_tensors(module: GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a graph's code reads from its module, with their names."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor):
            yield str(node.target), value


def _class(
    module: GraphModule, name: str, path: str, tensors: dict[str, torch.Tensor], imports: dict[str, None]
) -> str:
    """The source of a module as a class, with those of its inner graphs. Adds what it needs to `tensors` and `imports`."""
    inner, lines = [], []
    for attribute, called in _graphs_of(module):
        inner.append(_class(called, f"Graph_{attribute}", f"{path}{attribute}.", tensors, imports))
        lines.append(f"self.{attribute} = self.Graph_{attribute}(tensors)")
    for attribute, tensor in dict(find_tensors(module)).items():
        if isinstance(tensor, FakeTensor):
            lines.append(f"self.{attribute} = {example_code(tensor)}")
            continue
        tensors[path + attribute] = tensor
        lines.append(f"self.{attribute} = tensors[{path + attribute!r}]")
    code = module.graph.python_code("self", verbose=True)
    imports |= dict.fromkeys(_imports(code.globals))
    start = "\n".join(["def __init__(self, tensors):", "    super().__init__()", *(f"    {line}" for line in lines)])
    body = "\n\n".join([*inner, start, code.src.strip()])
    return f"class {name}(torch.nn.Module):\n{textwrap.indent(body, '    ')}"


def _graphs_of(module: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    names = dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr"))
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, GraphModule):
            yield name, value


def _imports(names: Mapping[str, Any]) -> Iterator[str]:
    """Yields the import lines of a graph's code, beyond those of every script."""
    for name, value in names.items():
        if callable(value) and not isinstance(value, (type, ModuleType)) and getattr(value, "__module__", None):
            yield f"from {value.__module__} import {value.__qualname__} as {name}"
