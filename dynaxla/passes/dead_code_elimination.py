"""Nodes that nothing reads and that have no effect are erased."""

from __future__ import annotations

from dynaxla.passes.manager import CapturedGraph, Pass, PassContext


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    graph.module.graph.eliminate_dead_code()
    graph.module.recompile()
    return graph


PASS = Pass("dead_code_elimination", _run, "every node is needed for an output, or has an effect")
