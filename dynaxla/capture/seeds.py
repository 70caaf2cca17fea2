"""Seeds of a graph's random draws: one of a kind, drawn anew at every call, and handed to the executables as an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dynaxla.ops.random import DRAW_SEED

_FORWARD = ("is_forward", "must_be_in_forward")  # AOTAutograd's tags; nodes of a user's own backward have none


def share_seeds(graph: Graph) -> None:
    """Leaves one seed for the forward's draws on a device, and one for the backward's own, which is new at every backward."""
    kept: dict[tuple[torch.device, bool], Node] = {}
    recomputes = any("recompute" in node.meta for node in graph.nodes)
    for node in graph.find_nodes(op="call_function", target=DRAW_SEED):
        forward = node.meta.get("partitioner_tag") in _FORWARD
        seed = kept.setdefault((node.args[0], forward), node)
        if seed is not node:
            node.replace_all_uses_with(seed)
            graph.erase_node(node)
        elif recomputes:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # what is drawn from it is drawn again in the backward


def take_seeds(module: GraphModule) -> list[torch.device]:
    """Turns the shared seeds that a graph draws into inputs behind the others; gives their devices."""
    graph = module.graph
    seeds = graph.find_nodes(op="call_function", target=DRAW_SEED)
    if not seeds:
        return []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in seeds:
        anchor = placeholders[-1] if placeholders else None
        with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
            given = graph.placeholder("seed")
        given.meta = {"val": node.meta["val"]}
        placeholders.append(given)
        node.replace_all_uses_with(given)
        graph.erase_node(node)
    module.recompile()
    return [node.args[0] for node in seeds]


def seeded(function: Callable[[Sequence[Any]], Any], devices: Sequence[torch.device]) -> Callable[[Sequence[Any]], Any]:
    """The function that takes seeds last, made to draw them."""
    if not devices:
        return function
    return lambda args: function([*args, *map(DRAW_SEED, devices)])
