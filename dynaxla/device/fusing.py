"""The fused mode: ops are collected, and run in one program when a value is read.

A trace is a list of steps, calls of ops whose graphs are known. Its key is which graphs those are and what each takes, of
earlier steps and of the trace's inputs. Numbers, starts of windows and seeds are inputs. What is computed is what somebody
holds when the trace is run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.device.calls import Call
from dynaxla.device.pending import Pending
from dynaxla.device.programs import CallBuilder, Traced
from dynaxla.errors import ExecutionError
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.transfers import download, upload_own

logger = logging.getLogger("dynaxla")

MOST_STEPS = 256
MOST_TRACES = 1024

Place = tuple[int, int]
"""A step and which of its results; -1 and which of the trace's inputs."""

_INPUT = -1


@dataclass(slots=True, eq=False)
class Step:
    """A collected call.

    Attributes:
        takes: for each placeholder of the graph what it is given.
        results: of the graph; dead ones are wanted by nobody.
        made_by: the op, with the user's line.
    """

    traced: Traced
    takes: tuple[Place, ...]
    results: list[ref[Pending]] = field(default_factory=list)
    made_by: str = ""


class Trace:
    """Collected calls. Nothing is added once it was taken out to be run."""

    def __init__(self, fused: Fused) -> None:
        self._fused = fused
        self.steps: list[Step] = []
        self.inputs: list[Buffer] = []
        self.lock = new_lock()
        self.is_done = False
        self._places: dict[int, int] = {}  # of the inputs, by identity: `inputs` keeps them alive

    def finish(self) -> None:
        self._fused.finish(self)

    def add(self, traced: Traced, given: Sequence[Any], arrays: int, made_by: str) -> list[Pending]:
        """A call whose pending inputs are of this trace.

        Args:
            arrays: how many of the inputs are memories. The others are given anew at every call: that two of them are equal
                says nothing of the next run.
        """
        takes = tuple([self._place(each, place < arrays) for place, each in enumerate(given)])
        made = [Pending(self, len(self.steps), result) for result in range(len(_returned(traced.graph)))]
        self.steps.append(Step(traced, takes, [ref(each) for each in made], made_by))
        return made

    def _place(self, given: Any, is_memory: bool) -> Place:
        if type(given) is Pending:
            return given.step, given.result
        found = self._places.get(id(given)) if is_memory else None
        if found is None:
            found = len(self.inputs)
            self.inputs.append(given)
            if is_memory:
                self._places[id(given)] = found
        return _INPUT, found


def wanted_of(steps: Sequence[Step]) -> tuple[Place, ...]:
    """The results that somebody holds."""
    return tuple(
        (number, result)
        for number, step in enumerate(steps)
        for result, each in enumerate(step.results)
        if each() is not None
    )


def needed_for(steps: Sequence[Step], wanted: Sequence[Place]) -> list[int]:
    """The steps that results need, in order."""
    found = {number for number, _ in wanted}
    for number in range(len(steps) - 1, -1, -1):
        if number in found:
            found.update(step for step, _ in steps[number].takes if step != _INPUT)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class TraceProgram:
    """A trace, compiled.

    Attributes:
        executable: None: its steps are run one by one.
        takes: the trace's inputs that it takes.
        gives: the results that it gives.
        apart: the steps' own programs; None where one has none either, and runs on the host.
    """

    executable: Executable | None
    takes: tuple[int, ...]
    gives: tuple[Place, ...]
    apart: Mapping[Traced, Executable | None] = field(default_factory=dict)


class Fused:
    """Collects calls and runs them. Safe from several threads: no lock is held while something is compiled, as who compiles
    waits for the lock of tracing, whose holder may read a tensor."""

    def __init__(self, builder: CallBuilder, recorder: Recorder) -> None:
        self.is_on = False
        self._builder = builder
        self._recorder = recorder
        self._lock = new_lock()
        self._trace = Trace(self)
        self._programs: OrderedDict[Any, dict[tuple[Place, ...], TraceProgram]] = OrderedDict()

    def collect(self, traced: Traced, given: Sequence[Any], call: Call, made_by: str) -> list[Pending]:
        """The results of a call, which is run later.

        Raises:
            ExecutionError: the run of an input failed.
        """
        if len(self._trace.steps) >= MOST_STEPS:
            self.force()
        outline = traced.outline
        arrays = sum(place < len(outline.captured.inputs.arrays) for place in outline.takes)
        while True:
            settled = [_settled(each) for each in given]
            with self._lock:
                trace = self._trace
                is_alike = not trace.steps or trace.steps[0].traced.precision == traced.precision
                others = [each for each in settled if type(each) is Pending and each.trace is not trace]
                if is_alike and not others:
                    return trace.add(traced, settled, arrays, made_by)
            if not is_alike:
                trace.finish()
            for each in others:
                each.buffer()

    def switch(self, is_on: bool) -> None:
        """Turns the mode on or off; runs what was collected."""
        self.is_on = is_on
        self.force()

    def force(self) -> None:
        """Runs what was collected. What fails is raised where its results are read."""
        if self._trace.steps:
            self.finish(self._trace)

    def finish(self, trace: Trace) -> None:
        """Runs a trace, if nobody did."""
        with self._lock:
            if trace is self._trace:
                self._trace = Trace(self)
        with trace.lock:
            steps = trace.steps  # which another thread may run, and let go, meanwhile
        wanted = wanted_of(steps)
        program = self._program(steps, wanted) if wanted else None
        with trace.lock:
            if not trace.is_done:
                self._run(steps, trace.inputs, program)
                trace.is_done = True
                trace.steps, trace.inputs = [], []

    def _run(self, steps: Sequence[Step], inputs: Sequence[Buffer], program: TraceProgram | None) -> None:
        if program is None:
            return
        self._recorder.count_trace()
        results: Sequence[Any]
        if program.executable is None:
            results = self._run_apart(steps, inputs, program)
        else:
            try:
                results = program.executable.run([inputs[place] for place in program.takes])
            except ExecutionError as error:
                results = [error] * len(program.gives)
        for (step, result), outcome in zip(program.gives, results, strict=True):
            pending = steps[step].results[result]()
            if pending is not None:
                pending.settle(outcome)

    # Programs

    def _program(self, steps: Sequence[Step], wanted: tuple[Place, ...]) -> TraceProgram:
        """One that gives what is wanted, or more: when Python's collector frees a result must not decide what is compiled."""
        key = tuple([(step.traced, step.takes) for step in steps])
        with self._lock:
            known = dict(self._programs.get(key, {}))
        found = known.get(wanted)
        if found is None:
            larger = [gives for gives in known if set(wanted) <= set(gives)]
            found = known[min(larger, key=len)] if larger else None
        if found is None:
            found = self._compiled(steps, wanted)
            with self._lock:
                self._programs.setdefault(key, {})[wanted] = found
                if len(self._programs) > MOST_TRACES:
                    self._programs.popitem(last=False)
        return found

    def _compiled(self, steps: Sequence[Step], wanted: tuple[Place, ...]) -> TraceProgram:
        with self._builder.shared.tracing:
            graph, takes = linked(steps, wanted)
        try:
            executable = self._builder.compile(graph, steps[0].traced, f"{len(steps)} ops")
        except Exception as error:  # the border of a trace, see partition/boundary.py
            self._recorder.add(traces_apart=1)
            logger.warning("%d collected ops have no program together, and run one by one: %s", len(steps), error)
            alone = {steps[number].traced: steps[number] for number in needed_for(steps, wanted)}
            return TraceProgram(None, takes, wanted, {traced: self._alone(step) for traced, step in alone.items()})
        return TraceProgram(executable, takes, wanted)

    def _alone(self, step: Step) -> Executable | None:
        with self._builder.shared.tracing:
            graph = linked_alone(step.traced)
        try:
            return self._builder.compile(graph, step.traced, step.traced.known.name)
        except Exception as error:  # the border of a call, see partition/boundary.py
            self._recorder.note_fallback(f"{step.made_by} runs on the host: {error}")
            return None

    def _run_apart(self, steps: Sequence[Step], inputs: Sequence[Buffer], program: TraceProgram) -> list[Any]:
        """Each step by its own program: the results that are wanted, or their errors."""
        made: dict[Place, Any] = {(_INPUT, place): buffer for place, buffer in enumerate(inputs)}
        for number in needed_for(steps, program.gives):
            step = steps[number]
            given = [made[place] for place in step.takes]
            failed = next((each for each in given if isinstance(each, ExecutionError)), None)
            executable = program.apart[step.traced]
            try:
                if failed is not None:
                    raise failed
                results = self._run_on_host(step.traced, given) if executable is None else executable.run(given)
            except ExecutionError as error:
                results = [error] * len(step.results)
            made |= {(number, result): buffer for result, buffer in enumerate(results)}
        return [made[place] for place in program.gives]

    def _run_on_host(self, traced: Traced, given: list[Buffer]) -> list[Any]:
        client = self._builder.client
        host = [download(client, buffer) for buffer in given]
        with torch.no_grad():
            results = GraphModule({}, traced.graph)(*host)
        self._recorder.count_on_host(traced.known.name)
        return [upload_own(client, result.contiguous()) for result in results]


def linked(steps: Sequence[Step], wanted: Sequence[Place]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of a trace that gives what is wanted, and which inputs it takes."""
    needed = needed_for(steps, wanted)
    graph, values = Graph(), dict[Place, Node]()
    for number in needed:
        step = steps[number]
        for place, node in zip(step.takes, step.traced.graph.find_nodes(op="placeholder"), strict=True):
            if place[0] == _INPUT and place not in values:
                values[place] = made = graph.placeholder(f"input_{place[1]}")
                made.meta = {"val": node.meta["val"]}
    takes = tuple(place for _, place in values)
    for number in needed:
        step = steps[number]
        results = _copied(graph, step.traced.graph, [values[place] for place in step.takes])
        values.update({(number, result): node for result, node in enumerate(results)})
    graph.output(tuple(values[place] for place in wanted))
    return graph, takes


def linked_alone(traced: Traced) -> Graph:
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


def _settled(given: Any) -> Any:
    """What a finished trace gave, in place of what was pending."""
    return given.buffer() if type(given) is Pending and given.trace is None else given
