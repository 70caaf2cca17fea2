"""Every op has its canonical name."""

from __future__ import annotations

from dynaxla.fx.aliased_ops import replace_aliased_ops
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    replace_aliased_ops(graph.module.graph)
    return graph


PASS = Pass("canonical_ops", _run, "an op that is another op under another name is that other op")
