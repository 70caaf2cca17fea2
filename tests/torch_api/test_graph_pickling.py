"""What the wall relies on of torch's pickler of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from dynaxla.torch_api import aot, graph_pickling, symbols
from tests.torch_api.boundary import boundary


def _captured(function: Any, *args: Any) -> Graph:
    """The ATen graph of a call whose sizes vary."""
    seen: list[Graph] = []

    def compiler(module: GraphModule, inputs: Any) -> Any:
        seen.append(module.graph)
        return aot.box_function(lambda given: list(module.forward(*given)))

    with torch.no_grad():
        backend = aot.aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
        torch.compile(function, backend=backend, dynamic=True)(*args)
    return seen[0]


@boundary("graph_pickling.dumps", "graph_pickling.loads")
def test_a_graph_is_the_same_behind_the_pickle() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + y).flatten().split(x.shape[0] * 2)[0], x.unflatten(1, (-1, 2)).sum(0)

    graph = _captured(function, torch.randn(5, 6), torch.randn(5, 6))
    back, number = graph_pickling.loads(graph_pickling.dumps((graph, 3), ("val",)))
    assert number == 3
    assert str(back) == str(graph)
    for mine, own in zip(back.nodes, graph.nodes, strict=True):
        assert mine.name == own.name
        assert set(mine.meta) <= {"val"}
        for one, other in zip(_numbers(mine), _numbers(own), strict=True):
            assert symbols.expression(one) == symbols.expression(other)
            assert symbols.example(one) == symbols.example(other)
    mine, own = (next(n for g in _numbers_of(each) if isinstance(n := g, torch.SymInt)) for each in (back, graph))
    symbol = symbols.expression(own)
    assert symbols.upper_bound(symbol, mine) == symbols.upper_bound(symbol, own)
    assert symbols.guarded_values(mine) == symbols.guarded_values(own)
    assert symbols.get_replacement(mine)(symbol) == symbols.get_replacement(own)(symbol)


@boundary("graph_pickling.loads")
def test_reading_adds_no_guards() -> None:
    """Fake tensors are asked for the sizes of their memory when they are made, which a capture need not know."""

    def function(x: torch.Tensor, rows: int) -> torch.Tensor:
        return x.new_zeros(rows, x.shape[1]) + x.sum(0)

    graph = _captured(function, torch.randn(5, 6), 7)
    back = graph_pickling.loads(graph_pickling.dumps(graph, ("val",)))
    mine, own = (next(n for n in _numbers_of(each) if isinstance(n, torch.SymInt)) for each in (back, graph))
    assert list(map(str, symbols.guards(mine))) == list(map(str, symbols.guards(own)))


@boundary("graph_pickling.loads")
def test_guards_of_what_was_read_narrow_its_ranges() -> None:
    graph = _captured(lambda x: x[1:] - x[:-1], torch.randn(5))
    back = graph_pickling.loads(graph_pickling.dumps(graph, ("val",)))
    number = next(n for n in _numbers_of(back) if isinstance(n, torch.SymInt))
    symbol = symbols.expression(number)
    assert symbols.upper_bound(symbol, number) is None
    assert bool(number < 9)
    assert symbols.upper_bound(symbol, number) == 8


@boundary("graph_pickling.CannotPickle")
def test_what_cannot_be_pickled_is_told() -> None:
    graph = Graph()
    graph.output(graph.call_function(lambda: 3))
    with pytest.raises(graph_pickling.CannotPickle, match="lambda"):
        graph_pickling.dumps(graph, ())


def _numbers(node: Any) -> list[Any]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [n for v in values for n in ((*v.shape, *v.stride()) if isinstance(v, torch.Tensor) else (v,))]


def _numbers_of(graph: Graph) -> list[Any]:
    return [number for node in graph.nodes for number in _numbers(node)]
