"""Two graphs have one key only if they are one program: hypothesis over pairs of graphs that nearly are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node

from dynaxla.isolation.failures import KnownFailures
from dynaxla.lowering.call_graph import call_graph
from dynaxla.lowering.function_cache import FunctionCache
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.graph_lowering import GraphLowering
from dynaxla.lowering.link import link
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.program_keys import graph_key
from dynaxla.observe.dump import Dump
from dynaxla.ops.table import core_table
from dynaxla.options import Options
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime.packaged_programs import environment_of
from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.runtime_state import process
from dynaxla.torch_api.fakes import FakeTensorMode

aten = torch.ops.aten
NUMBERS = (1, 1.0, True, 2, 2.0, 0.0, -0.0, math.inf, math.nan)
STEPS: dict[str, Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]] = {
    "add": lambda values, number: (aten.add.Tensor, (values[0], number)),
    "times": lambda values, number: (aten.mul.Tensor, (values[0], number)),
    "both": lambda values, number: (aten.add.Tensor, (values[0], values[-1])),
    "both turned": lambda values, number: (aten.add.Tensor, (values[-1], values[0])),
    "twice": lambda values, number: (aten.add.Tensor, (values[0], values[0])),
    "clamp below": lambda values, number: (aten.clamp.default, (values[0], 1.0)),
    "clamp above": lambda values, number: (aten.clamp.default, (values[0], None, 1.0)),
    "sum": lambda values, number: (aten.sum.dim_IntList, (values[0], [0])),
    "sum kept": lambda values, number: (aten.sum.dim_IntList, (values[0], [0], True)),
    "turn": lambda values, number: (
        aten.permute.default,
        (values[0], list(reversed(range(values[0].meta["val"].dim())))),
    ),
    "in halves": lambda values, number: (aten.split.Tensor, (values[0], 2)),
}
STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(NUMBERS))
GRAPH = st.tuples(
    st.sampled_from([(4,), (4, 1), (1, 4), (2, 2)]),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.lists(STEP, min_size=1, max_size=4),
    st.booleans(),
)


def build(shape: tuple[int, ...], dtype: torch.dtype, steps: list[tuple[str, Any]], reverse: bool) -> Graph | None:
    """The graph; None if torch refuses a step."""
    graph, mode = Graph(), FakeTensorMode()
    values: list[Node] = []
    for name in ("x", "y"):
        node = graph.placeholder(name)
        with mode:
            node.meta = {"val": torch.empty(shape, dtype=dtype)}
        values.append(node)
    for name, number in steps:
        target, args = STEPS[name](values, number)
        node = graph.call_function(target, args)
        try:
            with mode:
                found = target(*[a.meta["val"] if isinstance(a, Node) else a for a in args])
        except (RuntimeError, IndexError):
            return None
        node.meta = {"val": found}
        if isinstance(found, (tuple, list)):
            index = len(found) - 1
            node = graph.call_function(getitem, (node, index))
            node.meta = {"val": found[index]}
        values.insert(0, node)
    graph.output(tuple(reversed(values[:2])) if reverse else tuple(values[:2]))
    return graph


@pytest.fixture(scope="module")
def lowerer() -> GraphLowering:
    return GraphLowering(
        choice=LoweringChoice(KnownFailures()),
        worker=process().worker,
        store=FunctionTable(),
        function_cache=FunctionCache.of(None, Options()),
        tracing=threading.RLock(),
        limits=Options().lowering_limits,
        platform="cpu",
        precision=None,
        report=lambda node, failure: pytest.fail(str(failure)),
        dump=Dump(None, ()),
    )


@given(GRAPH, GRAPH, st.integers(0, 3), STEP)
def test_one_key_is_one_program(lowerer: GraphLowering, one: Any, other: Any, place: int, step: Any) -> None:
    shape, dtype, steps, reverse = one
    changed = [step if index == place else each for index, each in enumerate(steps)]
    found = [
        build(*each) for each in (one, (shape, dtype, changed, reverse), (shape, dtype, steps, not reverse), other)
    ]
    seen: dict[str, str] = {}
    named: dict[str | None, str] = {}
    for graph in found:
        if graph is not None:
            calls = call_graph(graph)
            key = graph_key(calls, core_table(), Options(), environment_of(cpu_client()))
            assert key is not None
            text = link(calls, lowerer.functions(calls)).program
            assert seen.setdefault(key.digest, text) == text
            part = PartGraphs(GraphModule(torch.nn.Module(), graph), (), (), True, core_table().pads)
            assert named.setdefault(part.name, text) == text
    assert len(set(seen.values())) == len(seen), "one program has two keys"
