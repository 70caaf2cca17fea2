"""Calls of higher-order operators (control flow, nested regions) become operators that can be compiled."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from dynaxla.observe.dump import Dump
from dynaxla.observe.recorder import Recorder
from dynaxla.partition.higher_order_ops import replace_regions
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext, run_passes
from dynaxla.passes.rewrites import REWRITES


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    context = replace(context, recorder=Recorder())  # the pass's own seconds have those of the passes that it runs
    chained = graph.weights if context.options.nested_regions == "loop" else set()

    def rewrite(module: GraphModule) -> None:
        run_passes(REWRITES, CapturedGraph("inference", module, graph.table), context, Dump(None, ()))

    taken = replace_regions(graph.module, chained, graph.table, context.device, context.region_numbers, rewrite)
    return replace(graph, table=taken.table, refused=taken.left)


PASS = Pass(
    "higher_order_calls",
    _run,
    "every higher-order call is an operator of `table`, is inlined into the graph, or is `refused` with a reason",
)
