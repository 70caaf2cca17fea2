"""Traces: calls that were collected, and the graph that they are together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch.fx import Graph, Node

from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.op_programs import TracedOp
from dynaxla.isolation.forking import new_lock
from dynaxla.runtime.client import Buffer

Place = tuple[int, int]
"""A step and which of its results; -1 and which of the trace's inputs."""

INPUT = -1


@dataclass(slots=True, eq=False)
class LazyOp:
    """A collected call.

    Attributes:
        takes: for each placeholder of the graph what it is given.
        results: of the graph; dead ones are wanted by nobody.
        made_by: the op, with the user's line.
    """

    traced: TracedOp
    takes: tuple[Place, ...]
    results: list[ref[LazyBuffer]] = field(default_factory=list)
    made_by: str = ""


class LazyTrace:
    """Collected calls. Nothing is added once it was taken out to be run."""

    def __init__(self, finish: Callable[[LazyTrace], None]) -> None:
        self._finish = finish
        self.steps: list[LazyOp] = []
        self.inputs: list[Buffer] = []
        self.lock = new_lock()
        self.is_done = False
        self._places: dict[int, int] = {}  # of the inputs, by identity: `inputs` keeps them alive

    def finish(self) -> None:
        self._finish(self)

    def add(self, traced: TracedOp, given: Sequence[Any], arrays: int, made_by: str) -> list[LazyBuffer]:
        """A call whose pending inputs are of this trace.

        Args:
            arrays: how many of the inputs are memories. The others are given anew at every call: that two of them are equal
                says nothing of the next run.
        """
        takes = tuple([self._place(each, place < arrays) for place, each in enumerate(given)])
        made = [LazyBuffer(self, len(self.steps), result) for result in range(len(_returned(traced.graph)))]
        self.steps.append(LazyOp(traced, takes, [ref(each) for each in made], made_by))
        return made

    def _place(self, given: Any, is_memory: bool) -> Place:
        if type(given) is LazyBuffer:
            return given.step, given.result
        found = self._places.get(id(given)) if is_memory else None
        if found is None:
            found = len(self.inputs)
            self.inputs.append(given)
            if is_memory:
                self._places[id(given)] = found
        return INPUT, found


def live_results(steps: Sequence[LazyOp]) -> tuple[Place, ...]:
    """The results that somebody holds."""
    return tuple(
        (number, result)
        for number, step in enumerate(steps)
        for result, each in enumerate(step.results)
        if each() is not None
    )


def required_ops(steps: Sequence[LazyOp], wanted: Sequence[Place]) -> list[int]:
    """The steps that results need, in order."""
    found = {number for number, _ in wanted}
    for number in range(len(steps) - 1, -1, -1):
        if number in found:
            found.update(step for step, _ in steps[number].takes if step != INPUT)
    return sorted(found)


def link_trace(steps: Sequence[LazyOp], wanted: Sequence[Place]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of a trace that gives what is wanted, and which inputs it takes."""
    needed = required_ops(steps, wanted)
    graph, values = Graph(), dict[Place, Node]()
    for number in needed:
        step = steps[number]
        for place, node in zip(step.takes, step.traced.graph.find_nodes(op="placeholder"), strict=True):
            if place[0] == INPUT and place not in values:
                values[place] = made = graph.placeholder(f"input_{place[1]}")
                made.meta = {"val": node.meta["val"]}
    takes = tuple(place for _, place in values)
    for number in needed:
        step = steps[number]
        results = _copied(graph, step.traced.graph, [values[place] for place in step.takes])
        values.update({(number, result): node for result, node in enumerate(results)})
    graph.output(tuple(values[place] for place in wanted))
    return graph, takes


def link_single_op(traced: TracedOp) -> Graph:
    """A call's graph, of which nothing is donated."""
    graph = Graph()
    given = []
    for node in traced.graph.find_nodes(op="placeholder"):
        made = graph.placeholder(node.name)
        made.meta = {"val": node.meta["val"]}
        given.append(made)
    graph.output(tuple(_copied(graph, traced.graph, given)))
    return graph


def _copied(graph: Graph, source: Graph, given: Sequence[Node]) -> list[Node]:
    """Copies the calls of a graph; gives its results."""
    values: dict[Node, Node] = dict(zip(source.find_nodes(op="placeholder"), given, strict=True))
    for node in source.nodes:
        if node.op == "call_function":
            values[node] = graph.node_copy(node, values.__getitem__)
    return [values[node] for node in _returned(source)]


def _returned(graph: Graph) -> tuple[Node, ...]:
    returned: Any = graph.output_node().args[0]
    return tuple(returned)
