"""Imports calls as a module of the torch dialect, one function per call."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg
from torch.fx.node import map_aggregate

from dynaxla.errors import LoweringError
from dynaxla.lowering.torch_mlir_importer import TorchMlir
from dynaxla.ops.aten_calls import AtenCallBuilder, Form

FIRST = "main"  # one of torch-mlir's passes asks for a function of that name


def import_calls(torch_mlir: TorchMlir, nodes: Sequence[Node], forms: Mapping[Any, Form]) -> tuple[bytes, list[str]]:
    """Imports nodes. Returns a module, as bytecode, with one function per node, and the functions' names.

    A function maps the node's tensor operands to the tensors among its results. The nodes carry fake
    or real tensors in `meta["val"]`, as their operands do, with plain integer sizes.

    Args:
        forms: the aten forms of ops that are imported as other ATen calls.

    Raises:
        LoweringError: torch-mlir's importer refuses a node.
    """
    importer = torch_mlir.fx_importer.FxImporter(context=torch_mlir.context(), config_check=False)
    names = [FIRST, *(f"call_{number}" for number in range(1, len(nodes)))][: len(nodes)]
    try:
        for name, node in zip(names, nodes, strict=True):
            importer.import_stateless_graph(single_call_graph(node, forms.get(node.target)), func_name=name)
    except (NotImplementedError, TypeError, AssertionError, RuntimeError) as error:
        raise LoweringError(
            explanation=f"torch-mlir's importer refused the graph: {error}",
            hint="DYNAXLA_DEBUG=dump=DIR,stages=fx writes the graph",
        ) from error
    return torch_mlir.bytecode(importer.module.operation), names


def single_call_graph(node: Node, form: Form | None) -> Graph:
    """A graph of one call, or of its aten form, with one placeholder per operand."""
    graph = Graph()

    def placeholder(operand: Node) -> Node:
        made = graph.placeholder(f"x{len(graph.nodes)}")
        made.meta = {"val": operand.meta["val"]}
        return made

    args, kwargs = map_arg((node.args, node.kwargs), placeholder)
    if form is not None:
        made = form(AtenCallBuilder(graph, node), *args, **kwargs)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
    else:
        call = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        call.meta = dict(node.meta)
        results = [call] if isinstance(node.meta["val"], torch.Tensor) else result_items(graph, call)
    graph.output(tuple(result for result in results if result is not None))
    graph.eliminate_dead_code()
    for made in graph.nodes:
        made.args, made.kwargs = map_aggregate(made.args, as_importable), map_aggregate(made.kwargs, as_importable)
    return graph


def as_importable(value: Any) -> Any:
    """Replaces a device by the CPU, as torch-mlir lowers some calls, such as `scalar_tensor`, only for the CPU or no device.
    And the layout of jagged tensors by that of dense ones: torch names it for the zero of a derivative, which is dense."""
    if isinstance(value, torch.layout):
        return torch.strided
    return torch.device("cpu") if isinstance(value, torch.device) else value


def result_items(graph: Graph, call: Node) -> list[Node]:
    """The nodes of the tensors among the results of a call with several results."""
    items = []
    for index, value in enumerate(call.meta["val"]):
        if isinstance(value, torch.Tensor):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = {"val": value}
            items.append(item)
    return items
