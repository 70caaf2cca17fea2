"""Seeds of a graph's random draws become inputs, which are drawn anew at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.custom_ops.threefry import DRAW_SEED, new_seed
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext

aten = torch.ops.aten


def take_seeds(module: GraphModule, constants: int) -> list[torch.device]:
    """Turns the seeds that a graph draws into inputs, one per device, in front of its last `constants` ones.

    Calls of one region, put into the graph, hold draws of the same numbers: a seed behind a device's first is that one
    plus a multiple of more than there are numbers.

    Returns:
        The devices.
    """
    graph = module.graph
    given: dict[torch.device, Node] = {}
    for position, node in enumerate(graph.find_nodes(op="call_function", target=DRAW_SEED)):
        device: torch.device = node.args[0]
        first = device not in given
        if first:
            given[device] = _input(graph, constants, node)
        with graph.inserting_before(node):
            seed = given[device] if first else graph.call_function(aten.add.Tensor, (given[device], position << 32))
        seed.meta = dict(node.meta)
        node.replace_all_uses_with(seed)
        graph.erase_node(node)
    module.recompile()
    return list(given)


def _input(graph: Graph, constants: int, node: Node) -> Node:
    placeholders = graph.find_nodes(op="placeholder")
    behind = placeholders[len(placeholders) - constants :]
    with graph.inserting_before(behind[0] if behind else _first_call(graph)):
        return graph.placeholder("seed")


def _first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op != "placeholder")  # type: ignore[no-any-return]


def add_seed_arguments(
    function: Callable[[Sequence[Any]], Any], devices: Sequence[torch.device]
) -> Callable[[Sequence[Any]], Any]:
    """A function of a graph's arguments and seeds, made to draw the seeds."""
    if not devices:
        return function
    return lambda args: function([*args, *map(new_seed, devices)])


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    return replace(graph, seeds=tuple(take_seeds(graph.module, len(graph.constants))))


PASS = Pass(
    "seed_inputs", _run, "no node draws a seed: `seeds` are inputs, one for each device, in front of the constants"
)
