"""A compiled graph of whose calls some are compared with eager: `options={"verify": 0.01}`."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dynaxla.errors import DivergenceError
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.differences import Difference
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.passes import shared_seeds
from dynaxla.passes.manager import CapturedGraph, GraphFunction, PassContext
from dynaxla.torch_api.aot import box_function
from dynaxla.verify.divergence import Divergence, DivergenceFinder
from dynaxla.verify.eager_graph import EagerGraph, copy_arguments, copy_captured, find_obstacle

logger = logging.getLogger("dynaxla")

Build = Callable[[CapturedGraph], GraphFunction]


@dataclass(frozen=True, slots=True)
class GraphChecker:
    """Checks the calls of one graph.

    Attributes:
        what: the user's function.
        graph: as captured; no pass changes it.
        options: the user's.
        recorder: counts the calls that are compared, and keeps what is found.
        finder: says where a difference comes from.
    """

    what: str
    graph: CapturedGraph
    options: Options
    recorder: Recorder
    finder: DivergenceFinder

    def wrap(self, function: GraphFunction) -> GraphFunction:
        """Makes a function that calls the compiled graph, and of some calls compares the results with eager's."""
        make_eager = cache(
            lambda: EagerGraph(self.graph)
        )  # at a call: while graphs are built, torch takes fake tensors alone
        calls, lock, found = itertools.count(), new_lock(), list[Divergence]()

        def run(args: list[Any]) -> list[Any]:
            call = next(calls)
            if not is_due(call, self.options.verify):
                return function(args)
            given = copy_arguments(args, self.graph.static_inputs)
            eager = make_eager()
            expected = _compute(eager, given)
            if not isinstance(expected, Exception):
                expected = self._read_values(expected)
            actual = function(args)
            self.recorder.add(verified_calls=1)
            differences = _compare(eager, self._read_values(actual), expected, given)
            if differences:
                with lock:
                    if not found:
                        found.append(self.finder.explain(f"{self.what}, call {call + 1}", differences, given))
                        self._tell(found[0])
                self._act(differences, found[0])
            return actual

        return box_function(run)

    def _read_values(self, results: list[Any]) -> list[Any]:
        """What torch reads of the results: of those that it makes views of inputs, the shape and dtype alone."""
        unread = frozenset() if self.graph.inputs is None else self.graph.inputs.unread
        return [value.new_zeros(()).expand(value.shape) if i in unread else value for i, value in enumerate(results)]

    def _tell(self, divergence: Divergence) -> None:
        self.recorder.note(divergences=str(divergence))
        logger.warning("%s", divergence)

    def _act(self, differences: dict[int, Difference], first: Divergence) -> None:
        self.recorder.add(diverged_calls=1)
        if self.options.verify_action == "raise":
            position, difference = next(iter(differences.items()))
            where = f"; here result {position} is {difference}" if first.difference != difference else ""
            raise DivergenceError(f"{first}{where}", 'verify_action="warn" logs this instead', frame=first.frame)


def build_checked(
    graph: CapturedGraph, build: Build, build_trial: Build, what: str, context: PassContext, recorder: Recorder
) -> GraphFunction:
    """Builds the function of a graph, whose calls are compared as the options say.

    Args:
        graph: as captured; it is changed.
        build: builds the function.
        build_trial: builds the function of a graph for calls that look for a fault, whatever the miss policy.
        what: the user's function.
    """
    obstacle = find_obstacle(graph.module)
    if obstacle is not None:
        recorder.note(unverified=f"{what}, {graph.kind}: {obstacle}")
        logger.warning("calls of %s, %s, are not verified: %s", what, graph.kind, obstacle)
        return build(graph)
    captured = copy_captured(graph)
    shared_seeds.share_seeds(captured.module.graph)  # else eager draws more numbers than the compiled graph
    told = f"{what}, {graph.kind} graph"
    finder = DivergenceFinder(captured, context, build_trial)
    checker = GraphChecker(told, captured, context.options, recorder, finder)
    return checker.wrap(build(graph))


def is_due(call: int, fraction: float) -> bool:
    """Whether a call is compared: the first, and from then on evenly the fraction of the calls.

    Args:
        call: its number, from 0.
    """
    return call == 0 or math.floor(call * fraction) > math.floor((call - 1) * fraction)


def _compute(eager: EagerGraph, given: Sequence[Any]) -> list[Any] | Exception:
    """Eager's results, or what it raises."""
    try:
        return eager.run(given)
    except Exception as error:  # an error of eager's is a result too; it may be a user's operator that raises
        return error


def _compare(
    eager: EagerGraph, actual: list[Any], expected: list[Any] | Exception, given: Sequence[Any]
) -> dict[int, Difference]:
    if isinstance(expected, Exception):
        return {0: Difference(problem=f"eager raises {type(expected).__name__}: {expected}")}
    return eager.find_differences(actual, expected, given)
