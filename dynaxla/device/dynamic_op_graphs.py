"""Calls of an op whose sizes vary: one graph for all of them, whose programs are those of buckets, as of compiled graphs.

Such a graph takes memories as they lie in the corners of larger buffers, and gives what lies so. It is made when calls of one
kind had many programs that differ in one size alone, or in sizes that grow with each other. What cannot be padded has exact
programs, as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from dynaxla.bucketing.size_expressions import Size, compile_sizes, size_of
from dynaxla.device.op_call import TENSOR, OpInvocation, leaf_parts
from dynaxla.device.op_programs import PRECISIONS
from dynaxla.device.shape_generic_key import NotShapeGeneric, SymbolicView, call_with_sizes, split_sizes, symbolic_views
from dynaxla.device.trace_op import TracedGraph, trace_dynamic_call
from dynaxla.device.view_layout import Ints
from dynaxla.errors import DynaxlaError, UnsupportedError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.compile_timing import CapturedFunction
from dynaxla.options import Options
from dynaxla.passes.manager import CapturedGraph, GraphFunction
from dynaxla.passes.seed_inputs import take_seeds
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime_state import RuntimeState
from dynaxla.targets.registry import target_of_device
from dynaxla.torch_api.fakes import drop_graph_sources, make_symbolic_mode
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.torch_api.symbols import expression, guards
from dynaxla.types import DEVICE_TYPE

logger = logging.getLogger("dynaxla")

MOST_GRAPHS = 64
"""Graphs of one kind, which differ in the sizes that do not vary."""

MOST_KINDS, MOST_SEEN = 4096, 128

MANY = 12
"""From this number of programs of a kind that differ in the same sizes, more are expected. A program of fixed sizes takes
20 ms, a graph with its first program ten times that. The layers of a network seldom differ so often in one size alone."""

MANY_APART = 40
"""The same for kinds with several sizes that vary independently: more programs than the layers of a network have."""

MOST_APART = 3


@dataclass(frozen=True, slots=True)
class DynamicDims:
    """Which sizes of a kind vary.

    Attributes:
        base: the sizes of one call.
        classes: for each size the number of the class that it varies with; -1: it does not vary.
    """

    base: Ints
    classes: Ints

    def takes(self, values: Ints) -> bool:
        """Whether a call of these sizes differs in nothing else: sizes of one class are equal, and 2 or more."""
        found: dict[int, int] = {}
        for value, was, number in zip(values, self.base, self.classes, strict=True):
            if (value != was) if number < 0 else (value < 2 or found.setdefault(number, value) != value):
                return False
        return True

    def examples(self) -> list[int]:
        """A size of each class."""
        return [self.base[self.classes.index(number)] for number in range(max(self.classes) + 1)]


class ProgramConditions(NamedTuple):
    """What decides of a program beside the call.

    Attributes:
        is_deterministic: whether torch is to give the same bits every time. A bucket's program may round otherwise than that of
            fixed sizes, which the same call had before.
    """

    dtype: torch.dtype
    precision: str
    is_deterministic: bool


@dataclass(slots=True, eq=False)
class DynamicOpGraph:
    """All calls of a kind that differ in a pattern's sizes alone.

    Attributes:
        captured: what the graph takes and gives.
        function: takes tensors of the memories, then the further inputs, then sizes; gives the results.
        views: of the call's tensors.
        arrays: for each memory the tensor of the call that is all of it, row-major; or None.
        varying: the memories whose sizes vary.
        sizes: places in the call's sizes of those that the function takes, in front of the seeds.
        seeds: how many it takes.
        holds: whether the graph is right for such sizes, by the examples' order.
        last: what stands for the sizes of its last call.
    """

    pattern: DynamicDims
    captured: TracedGraph
    function: GraphFunction
    views: tuple[SymbolicView, ...]
    arrays: tuple[int | None, ...]
    varying: Ints
    sizes: Ints
    seeds: int
    holds: Callable[..., tuple[int, ...]]
    last: object = None

    def takes(self, call: OpInvocation, values: Ints) -> bool:
        """Whether the graph computes a call of the kind: its guards hold, and its tensors lie as the graph reads them."""
        if not self.pattern.takes(values):
            return False
        examples = replace(self.pattern, base=values).examples()
        if not all(self.holds(*examples)):
            return False
        try:
            here = call_with_sizes(call, self.views, values)
        except NotShapeGeneric:
            return False
        return _lyings(here) == _lyings(call)


def _lyings(call: OpInvocation) -> list[Any]:
    leaves = [leaf for part in (*call.parts, *(part for _, part in call.named)) for leaf in leaf_parts(part)]
    return [(leaf[1], leaf[2].layout) for leaf in leaves if leaf[0] == TENSOR]


@dataclass(slots=True, eq=False)
class CallKind:
    """What is known of the calls that differ in sizes alone.

    Attributes:
        seen: the sizes of calls that got programs of their own, the latest last.
        graphs: that serve calls of the kind.
        refusal: why every call has a program of its own; None while calls may get a graph.
    """

    seen: list[Ints] = field(default_factory=list)
    graphs: list[DynamicOpGraph] = field(default_factory=list)
    refusal: str | None = None


class DynamicOpGraphs:
    """Finds or makes the graph of calls whose sizes vary. Safe from several threads.

    Args:
        shared: the process's.
    """

    def __init__(self, shared: RuntimeState) -> None:
        self._shared = shared
        self._options = Options.from_mapping({"fallback": "error", "bucketing": "require"})
        self._kinds: ProgramCache[Hashable, CallKind] = ProgramCache(MOST_KINDS)
        self._lock = new_lock()

    def find(self, call: OpInvocation, terms: ProgramConditions) -> DynamicOpGraph | None:
        """The graph of a call that has no program; None if it is to have one of its own, which is noted."""
        if terms.is_deterministic:
            return None
        try:
            generic = split_sizes(call)
        except NotShapeGeneric:
            return None
        kind = self._kinds.get_or_make((generic.kind, terms), CallKind)
        with self._lock:
            graphs, is_refused = list(kind.graphs), kind.refusal is not None
        found = next((each for each in graphs if each.takes(call, generic.values)), None)
        if found is not None or is_refused:
            return found
        pattern = self._note_sizes(kind, generic.values)
        return None if pattern is None else self._make_graph(call, kind, pattern)

    def refusal(self, call: OpInvocation, terms: ProgramConditions) -> str | None:
        """Why calls of this kind have programs of their own; None if no graph was tried."""
        try:
            kind = self._kinds.get((split_sizes(call).kind, terms))
        except NotShapeGeneric:
            return None
        return None if kind is None else kind.refusal

    def refuse(self, call: OpInvocation, terms: ProgramConditions, error: Exception) -> None:
        """Calls of this kind have programs of their own from now on."""
        self._refuse(call, self._kinds.get_or_make((split_sizes(call).kind, terms), CallKind), _describe(error))

    def _refuse(self, call: OpInvocation, kind: CallKind, why: str) -> None:
        logger.info("%s has a program for each set of sizes: %s", call.known.name, why)
        with self._lock:
            kind.refusal = why
            kind.graphs.clear()
            kind.seen.clear()

    def _note_sizes(self, kind: CallKind, values: Ints) -> DynamicDims | None:
        with self._lock:
            pattern = find_dynamic_dims(kind.seen, values)
            if values not in kind.seen:
                kind.seen.append(values)
                del kind.seen[:-MOST_SEEN]
        return pattern

    def _make_graph(self, call: OpInvocation, kind: CallKind, pattern: DynamicDims) -> DynamicOpGraph | None:
        try:
            made = self._built(call, pattern)
        except Exception as error:  # the border of a call, see partition/error_boundary.py
            self._refuse(call, kind, _describe(error))
            return None
        if not made.takes(call, pattern.base):
            self._refuse(call, kind, "its graph holds for other sizes alone")
            return None
        with self._lock:
            kind.graphs.append(made)
            del kind.graphs[:-MOST_GRAPHS]
        return made

    def _built(self, call: OpInvocation, pattern: DynamicDims) -> DynamicOpGraph:
        """
        Raises:
            NotShapeGeneric: its sizes cannot vary.
            UnsupportedError: it cannot be padded.
        """
        views = tuple(symbolic_views(call))
        read = set(pattern.classes[: sum(len(memory.spec.shape) for memory in call.memories)])
        given = [number for number in range(len(pattern.examples())) if number not in read]
        with self._shared.tracing, drop_graph_sources():
            mode, sizes = make_symbolic_mode(pattern.examples())
            symbols = [expression(size) for size in sizes]
            values = [
                was if number < 0 else sizes[number] for was, number in zip(pattern.base, pattern.classes, strict=True)
            ]
            captured = trace_dynamic_call(
                lambda: call_with_sizes(call, views, values), mode, [sizes[number] for number in given]
            )
            if any(size_of(size) != symbol for size, symbol in zip(sizes, symbols, strict=True)):
                raise NotShapeGeneric("sizes depend on each other")
            _check(captured, views)
            seeds = len(take_seeds(captured.module, 0))
            holds = compile_sizes(guards(sizes[0]), symbols)
            function = self._function(call, captured)
        places = tuple(pattern.classes.index(number) for number in given)
        plain = {view.memory: i for i, view in reversed(list(enumerate(views))) if view.layout.is_plain}
        arrays = tuple(plain.get(place) for place in range(len(call.memories)))
        varying = _varying(call, pattern)
        return DynamicOpGraph(pattern, captured, function, views, arrays, varying, places, seeds, holds)

    def _function(self, call: OpInvocation, captured: TracedGraph) -> GraphFunction:
        graph, target = captured.module.graph, target_of_device(torch.device(DEVICE_TYPE))
        shapes = tuple(_shape(node) for node in graph.find_nodes(op="placeholder"))
        results = tuple(_shape(node) for node in graph.output_node().all_input_nodes)
        policies = replace(target.policies(False), shapes=shapes, results=results)
        options = replace(self._options, matmul_precision=PRECISIONS[torch.get_float32_matmul_precision()])
        builder = GraphBuilder(
            self._shared, options, policies, FunctionPolicy(), CapturedFunction(call.known.name), target
        )
        return builder.build_op(CapturedGraph("inference", captured.module, self._shared.registered.current))


def find_dynamic_dims(seen: Sequence[Ints], values: Ints) -> DynamicDims | None:
    """The sizes in which many calls, the last of them of these values, differ alone: `MANY` where these move together, else
    `MANY_APART`; None if they differ in others."""
    differing = (
        tuple(i for i, (one, two) in enumerate(zip(values, other, strict=True)) if one != two)
        for other in reversed(seen)
    )
    for varying in dict.fromkeys(differing):
        fixed = [i for i in range(len(values)) if i not in varying]
        alike = [values, *(each for each in seen if all(each[i] == values[i] for i in fixed))]
        columns = {i: tuple(each[i] for each in alike) for i in varying}
        numbers = {column: number for number, column in enumerate(dict.fromkeys(columns.values()))}
        moves = {tuple(size - column[0] for size in column) for column in numbers}
        if len(alike) < (MANY if len(moves) == 1 else MANY_APART) or len(moves) > MOST_APART:
            continue
        classes = tuple(numbers[columns[i]] if i in columns else -1 for i in range(len(values)))
        examples = [values[i] for i in varying]
        if min(examples) >= 2 and len(set(examples)) == len(numbers):
            return DynamicDims(values, classes)
    return None


def _describe(error: Exception) -> str:
    """Why a kind has no graph, in one line."""
    reasons = error.reasons if isinstance(error, UnsupportedError) else ()
    known = isinstance(error, (DynaxlaError, NotShapeGeneric))
    text = str(reasons[0]) if reasons else str(error) if known else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def _varying(call: OpInvocation, pattern: DynamicDims) -> Ints:
    """The memories of a call whose sizes vary."""
    classes = iter(pattern.classes)
    found = [max([next(classes) for _ in memory.spec.shape], default=-1) >= 0 for memory in call.memories]
    return tuple(place for place, varies in enumerate(found) if varies)


def _shape(node: Node) -> tuple[Size, ...]:
    value = node.meta["val"]
    return tuple(map(size_of, value.shape)) if isinstance(value, torch.Tensor) else ()


def _check(captured: TracedGraph, views: Sequence[SymbolicView]) -> None:
    """
    Raises:
        NotShapeGeneric: it writes to a part of a memory, which is donated to its own program; or a result is a number.
    """
    if any(not write.resized and not views[write.tensor].layout.is_whole for write in captured.writes):
        raise NotShapeGeneric("it writes to a part of a memory")
    if any(not isinstance(each, int | None) for each in tree_leaves(captured.results)):
        raise NotShapeGeneric("a result is a number")
