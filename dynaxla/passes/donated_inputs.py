"""Inputs of the device whose memory an executable may take for their new values."""

from __future__ import annotations

from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.programs.donation import keep_written, mark_donated
from dynaxla.types import DEVICE_TYPE


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if graph.inputs is not None and context.device.type == DEVICE_TYPE:
        bases = set() if graph.aliases is None else set(graph.aliases.bases)
        mark_donated(graph.module, graph.inputs, bases, trains=graph.kind != "inference")
    elif graph.inputs is not None:
        keep_written(graph.module, graph.inputs)
    return graph


PASS = Pass(
    "donated_inputs",
    _run,
    "on the device, inputs whose memory an executable may take for their new values have `meta[DONATED]`",
)
