"""Functions of a graph's calls, lowered for the CPU in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache

from dynaxla.isolation.failures import KnownFailures
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.lowering.function_cache import FunctionCache
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.graph_lowering import GraphLowering
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.stablehlo_functions import StablehloFunction
from dynaxla.observe.dump import Dump
from dynaxla.options import Options
from dynaxla.runtime_state import process


@cache
def _lowering() -> GraphLowering:
    def fail(node: object, failure: object) -> None:
        raise AssertionError(failure)

    return GraphLowering(
        choice=LoweringChoice(KnownFailures()),
        worker=process().worker,
        store=FunctionTable(),
        function_cache=FunctionCache.of(None, Options()),
        tracing=threading.RLock(),
        limits=Options().lowering_limits,
        platform="cpu",
        precision=None,
        report=fail,
        dump=Dump(None, ()),
    )


def functions_of(graph: CallGraph) -> Mapping[str, StablehloFunction]:
    return _lowering().functions(graph)
