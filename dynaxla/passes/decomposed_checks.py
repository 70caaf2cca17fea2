"""Keeps the assertions about values that decompositions have left, or removes them.

An op that is decomposed is checked where that is done (decompositions/assertions.py), before anybody knows whether values are
checked. Backwards need none: what a backward reads, its forward has checked. A branch or a loop with one would run in eager.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from dynaxla.decompositions.assertions import VALUE_CHECK
from dynaxla.diagnostics import user_frame
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.targets.cpu import CPU

aten = torch.ops.aten


def are_values_checked(graph: CapturedGraph, context: PassContext) -> bool:
    """Whether a graph's values are: by default those of the CPU alone, whose results are waited for anyway."""
    wanted = context.options.value_checks
    if wanted is None:
        wanted = context.device.type == "cpu" and context.target is CPU
    return wanted and graph.kind != "backward"


def choose_checks(module: GraphModule, are_kept: bool) -> None:
    """Keeps those of a graph, with the user's line, or removes them and what they alone read."""
    calls = module.graph.find_nodes(op="call_function", target=aten._assert_async.msg)
    found = [call for call in calls if str(call.args[1]).startswith(VALUE_CHECK)]
    if not found:
        return
    for node in found:
        frame, message = user_frame(node), str(node.args[1]).removeprefix(VALUE_CHECK)
        if are_kept:
            node.args = node.args[0], f"{message} (at {frame})" if frame else message
        else:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    wanted = are_values_checked(graph, context)
    for part in graph.module.modules():
        if isinstance(part, GraphModule):
            choose_checks(part, wanted and part is graph.module)
    return graph


PASS = Pass(
    "decomposed_checks",
    _run,
    "the assertions of decomposed ops about their values are there where values are checked alone, and in no branch or loop",
)
