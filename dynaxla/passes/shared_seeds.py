"""One seed for all random draws of a forward on a device, and one for the draws of its backward."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.threefry import DRAW_SEED
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.aot import is_checkpointed, is_forward, save_always


def share_seeds(graph: Graph) -> None:
    """Leaves one seed for the forward's draws on a device, and one for the backward's own, which is new at every backward."""
    kept: dict[tuple[torch.device, bool], Node] = {}
    recomputes = is_checkpointed(graph)
    for node in graph.find_nodes(op="call_function", target=DRAW_SEED):
        forward = is_forward(node)
        seed = kept.setdefault((node.args[0], forward), node)
        if seed is not node:
            node.replace_all_uses_with(seed)
            graph.erase_node(node)
        elif recomputes:
            save_always(node)  # what is drawn from it is drawn again in the backward


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    share_seeds(graph.module.graph)
    return graph


PASS = Pass("shared_seeds", _run, "a call draws one seed for each device, and a backward one of its own")
