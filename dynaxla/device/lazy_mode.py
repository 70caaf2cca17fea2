"""The fused mode: ops are collected, and run in one program when a value is read.

A trace is a list of steps, calls of ops whose graphs are known. Its key is which graphs those are and what each takes, of
earlier steps and of the trace's inputs. Numbers, starts of windows and seeds are inputs. What is computed is what somebody
holds when the trace is run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaxla.device.lazy_buffer import LazyBuffer, drop_traceback
from dynaxla.device.lazy_graph import (
    INPUT,
    LazyOp,
    LazyTrace,
    Place,
    link_single_op,
    link_trace,
    live_results,
    required_ops,
)
from dynaxla.device.op_call import OpInvocation
from dynaxla.device.op_programs import OpProgramBuilder, TracedOp
from dynaxla.errors import ExecutionError
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.client import Buffer, Executable

logger = logging.getLogger("dynaxla")

MOST_STEPS = 256
MOST_TRACES = 1024


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
    apart: Mapping[TracedOp, Executable | None] = field(default_factory=dict)


class LazyMode:
    """Collects calls and runs them. Safe from several threads: no lock is held while something is compiled, as who compiles
    waits for the lock of tracing, whose holder may read a tensor."""

    def __init__(self, builder: OpProgramBuilder, recorder: Recorder) -> None:
        self.is_on = False
        self._builder = builder
        self._recorder = recorder
        self._lock = new_lock()
        self._trace = LazyTrace(self.finish)
        self._programs: ProgramCache[Any, Mapping[tuple[Place, ...], TraceProgram]] = ProgramCache(MOST_TRACES)

    def collect(self, traced: TracedOp, given: Sequence[Any], call: OpInvocation, made_by: str) -> list[LazyBuffer]:
        """The results of a call, which is run later.

        Raises:
            ExecutionError: the run of an input failed.
        """
        if len(self._trace.steps) >= MOST_STEPS:
            self.force()
        outline = traced.outline
        arrays = sum(place < len(outline.inputs.arrays) for place in outline.takes)
        while True:
            settled = [_settled(each) for each in given]
            with self._lock:
                trace = self._trace
                is_alike = not trace.steps or trace.steps[0].traced.precision == traced.precision
                others = [each for each in settled if type(each) is LazyBuffer and each.trace is not trace]
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

    def finish(self, trace: LazyTrace) -> None:
        """Runs a trace, if nobody did."""
        with self._lock:
            if trace is self._trace:
                self._trace = LazyTrace(self.finish)
        with trace.lock:
            steps = trace.steps  # which another thread may run, and let go, meanwhile
        wanted = live_results(steps)
        program = self._program(steps, wanted) if wanted else None
        with trace.lock:
            if not trace.is_done:
                self._run(steps, trace.inputs, program)
                trace.is_done = True
                trace.steps, trace.inputs = [], []

    def _run(self, steps: Sequence[LazyOp], inputs: Sequence[Buffer], program: TraceProgram | None) -> None:
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
                results = [drop_traceback(error)] * len(program.gives)
        for (step, result), outcome in zip(program.gives, results, strict=True):
            pending = steps[step].results[result]()
            if pending is not None:
                pending.settle(outcome, self._builder.client.mesh_devices)

    # Programs

    def _program(self, steps: Sequence[LazyOp], wanted: tuple[Place, ...]) -> TraceProgram:
        """One that gives what is wanted, or more: when Python's collector frees a result must not decide what is compiled."""
        key = tuple([(step.traced, step.takes) for step in steps])
        known = self._programs.get(key) or {}
        self._programs.mark_used(key)
        found = known.get(wanted)
        if found is None:
            larger = [gives for gives in known if set(wanted) <= set(gives)]
            found = known[min(larger, key=len)] if larger else None
        if found is None:
            found = self._compiled(steps, wanted)
            self._programs.put(key, {**known, wanted: found})
        return found

    def _compiled(self, steps: Sequence[LazyOp], wanted: tuple[Place, ...]) -> TraceProgram:
        with self._builder.shared.tracing:
            graph, takes = link_trace(steps, wanted)
        try:
            executable = self._builder.compile(graph, steps[0].traced, f"{len(steps)} ops")
        except Exception as error:  # the border of a trace, see partition/error_boundary.py
            self._recorder.add(traces_apart=1)
            logger.warning("%d collected ops have no program together, and run one by one: %s", len(steps), error)
            alone = {steps[number].traced: steps[number] for number in required_ops(steps, wanted)}
            return TraceProgram(None, takes, wanted, {traced: self._alone(step) for traced, step in alone.items()})
        return TraceProgram(executable, takes, wanted)

    def _alone(self, step: LazyOp) -> Executable | None:
        with self._builder.shared.tracing:
            graph = link_single_op(step.traced)
        try:
            return self._builder.compile(graph, step.traced, step.traced.known.name)
        except Exception as error:  # the border of a call, see partition/error_boundary.py
            self._recorder.note(fallbacks=f"{step.made_by} runs on the host: {error}")
            return None

    def _run_apart(self, steps: Sequence[LazyOp], inputs: Sequence[Buffer], program: TraceProgram) -> list[Any]:
        """Each step by its own program: the results that are wanted, or their errors."""
        made: dict[Place, Any] = {(INPUT, place): buffer for place, buffer in enumerate(inputs)}
        for number in required_ops(steps, program.gives):
            step = steps[number]
            given = [made[place] for place in step.takes]
            failed = next((each for each in given if isinstance(each, ExecutionError)), None)
            executable = program.apart[step.traced]
            try:
                if failed is not None:
                    raise failed
                results = self._builder.run_on_host(step.traced, given) if executable is None else executable.run(given)
            except ExecutionError as error:
                results = [drop_traceback(error)] * len(step.results)
            made |= {(number, result): buffer for result, buffer in enumerate(results)}
        return [made[place] for place in program.gives]


def _settled(given: Any) -> Any:
    """What a finished trace gave, in place of what was pending."""
    return given.buffer() if type(given) is LazyBuffer and given.trace is None else given
