"""Builds the function that runs a functional graph: one compiled part, or compiled parts between eager ops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.decompositions.assertions import raise_failed_assertions, take_assertions
from dynaxla.diagnostics import FallbackReason
from dynaxla.dispatch import PartFunction
from dynaxla.errors import (
    CompileError,
    CompileTimeout,
    CompileUnavailable,
    LinkError,
    LoweringError,
    LoweringUnavailable,
    UnsupportedError,
)
from dynaxla.fx.edit import tolerate_strides
from dynaxla.fx.graph_utils import make_dense, make_eager_function
from dynaxla.isolation.failures import CompilerFailure
from dynaxla.lowering.bisect import Culprit, equal_calls, find_first_failing
from dynaxla.observe.repro import write_repro
from dynaxla.partition.error_boundary import Boundary
from dynaxla.partition.op_support import (
    failure_reason,
    is_assertion,
    is_size_arithmetic,
    make_misprediction_reason,
    make_surrounded_reason,
    refusal,
)
from dynaxla.partition.partitioner import SplitGraph, WholePart, partition
from dynaxla.pipeline import Pipeline
from dynaxla.programs.donation import forget_donated, mark_inner
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.torch_api.symbols import varies
from dynaxla.torch_api.transforms import is_surrounded
from dynaxla.types import ORIGIN, Saved

logger = logging.getLogger("dynaxla")

Failures = Mapping[str, FallbackReason]
MakePart = Callable[[PartGraphs], PartFunction]


@dataclass(frozen=True, slots=True)
class PartBuilder:
    """Builds the function that runs a functional graph: one compiled part, or compiled parts between eager ops.

    Attributes:
        cuts: how often a part may be partitioned again around ops that fail to compile; then the whole part runs in eager.
    """

    pipeline: Pipeline
    device: torch.device
    make_part: MakePart
    cuts: int = 8

    def build(
        self,
        module: GraphModule,
        weights: Sequence[int],
        constants: Sequence[torch.Tensor],
        failed: Failures,
        saved: Saved,
    ) -> PartFunction:
        """Partitions the graph around ops that cannot be compiled, and builds its function.

        `failed` has the reasons of earlier compile failures, by node name.

        Raises:
            UnsupportedError: an op cannot be compiled and options say fallback="error".
        """
        return self.build_partitioned(self.cut(module, weights, constants, failed, saved))

    def cut(
        self,
        module: GraphModule,
        weights: Sequence[int],
        constants: Sequence[torch.Tensor],
        failed: Failures,
        saved: Saved,
    ) -> WholePart | SplitGraph:
        """Partitions the graph, in place: one part if all of it can be compiled, else parts between the unsupported ops."""
        table = self.pipeline.choice.table.records

        def refuse(node: Node) -> FallbackReason | None:
            return failed.get(node.name) or refusal(node, table, self.device)

        cut = partition(module, refuse)
        if cut.root is not None:
            return SplitGraph(cut.root, cut.reasons, tuple(weights), tuple(constants), saved)
        assertions = take_assertions(module, [node for node in module.graph.nodes if is_assertion(node)])
        if assertions:
            forget_donated(module)
        return WholePart(self._graphs(module, weights, constants, saved), tuple(assertions))

    def build_partitioned(self, found: WholePart | SplitGraph) -> PartFunction:
        """Builds the function that runs a partitioned graph.

        Raises:
            UnsupportedError: an op runs in eager, and options say fallback="error".
        """
        if isinstance(found, WholePart):
            return raise_failed_assertions(self._compiled(found.graphs), found.assertions)
        self._report(found.reasons)
        return self._composite(found)

    def _graphs(
        self, module: GraphModule, weights: Sequence[int], constants: Sequence[torch.Tensor], saved: Saved
    ) -> PartGraphs:
        pads = self.pipeline.choice.table.pads
        return PartGraphs(module, weights, constants, self.pipeline.options.fold_parameters, pads, saved)

    def _compiled(self, graphs: PartGraphs) -> PartFunction:
        return RecoveringPart(self, self.make_part(graphs), graphs)

    def _composite(self, pieces: SplitGraph) -> PartFunction:
        """Builds a function from parts and eager ops. Parts take and return dense tensors, since eager ops may read them."""
        root, constants, saved = pieces.root, pieces.constants, pieces.saved
        placeholders = [n for n in root.graph.nodes if n.op == "placeholder"]
        held = {placeholders[i] for i in pieces.weights}
        for node in root.graph.nodes:
            if node.op == "call_module":
                inner = root.get_submodule(node.target)
                assert isinstance(inner, GraphModule)
                static = [i for i, operand in enumerate(node.args) if operand in held]
                mark_inner(root.graph, node, inner)
                made = {i: n for i, n in enumerate(node.args) if isinstance(n, Node) and n.op != "placeholder"}
                graphs = self._graphs(inner, static, (), Saved(in_training=saved.in_training))
                part = PredictionChecked(self._compiled(graphs), inner, made, self._note)
                setattr(root, node.target, part)
        tolerate_strides(root.graph)
        root.recompile()

        returns_one = _returns_one(root)

        def run(args: Sequence[Any]) -> list[Any]:
            results = root.forward(*(make_dense(args) if saved.inputs else args), *constants)
            return [results] if returns_one else list(results)

        return run

    def _report(self, reasons: Sequence[FallbackReason]) -> None:
        if reasons and self.pipeline.options.fallback == "error":
            raise UnsupportedError(reasons=tuple(reasons))
        self.pipeline.recorder.add(eager_ops=len(reasons))
        for reason in dict.fromkeys(reasons):
            self._note(reason)

    def _note(self, reason: FallbackReason) -> None:
        self.pipeline.recorder.note(fallbacks=str(reason))
        logger.warning("%s", reason)


class RecoveringPart:
    """A compiled part that is partitioned again if compiling it fails, and runs in eager if that fails too.

    A part has no effect but its results, so a failed call is repeated on the replacement.
    """

    def __init__(self, builder: PartBuilder, function: PartFunction, graphs: PartGraphs) -> None:
        self._builder = builder
        self._function = function
        self._graphs = graphs
        self._instead: PartFunction | None = None
        self._is_told = False

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        if is_surrounded(args):
            return self._run_surrounded(args)
        if self._instead is None:
            try:
                return self._function(args)
            except Exception as error:  # the boundary of a part, see partition/error_boundary.py
                return self._recover(error, args)
        return self._instead(args)

    def _run_surrounded(self, args: Sequence[Any]) -> list[Any]:
        """Runs one call in eager, where what surrounds it sees its ops; this is told once."""
        if not self._is_told:
            pipeline = self._builder.pipeline
            Boundary(pipeline.recorder, pipeline.options).leave(make_surrounded_reason("a part"), self._graphs.module)
            self._is_told = True
        return self._graphs.run_eager(args, in_transforms=True)

    def _recover(self, error: Exception, args: Sequence[Any]) -> list[Any]:
        """Has the part run otherwise from now on: partitioned again if it could not be compiled, else in eager.

        Raises:
            Exception: eager refuses the arguments, too: the part stays as it is.
        """
        pipeline, graphs = self._builder.pipeline, self._graphs
        try:
            self._instead = self._partition_again(error, args)
        except Exception as last:  # the boundary of a part, too
            boundary = Boundary(pipeline.recorder, pipeline.options)
            boundary.pass_on(last)
            results = graphs.run_eager(args)
            boundary.take(last, "a part", graphs.module)
            self._instead = graphs.run_eager
            return results
        return self._instead(args)

    def _partition_again(self, error: Exception, args: Sequence[Any]) -> PartFunction:
        """
        Raises:
            Exception: `error`, if it does not say that the part cannot be compiled.
        """
        if not isinstance(error, (LoweringError, LinkError, CompileError)):
            raise error
        failed, again = self._failures(error, args), replace(self._builder, cuts=self._builder.cuts - 1)
        graphs = self._graphs
        return again.build(graphs.module, graphs.weights, graphs.constants, failed, graphs.saved)

    def _failures(self, error: LoweringError | LinkError | CompileError, args: Sequence[Any]) -> Failures:
        """Returns the reason for each node that failed to compile; for every node of the part if none can be singled out."""
        found = self._culprits(error, args) if self._builder.cuts else []
        blamed = {culprit.node.meta[ORIGIN]: culprit.failure for culprit in found}
        nodes = [n for n in self._graphs.module.graph.nodes if n.op == "call_function" and not is_size_arithmetic(n)]
        if not blamed:
            op = error.op if isinstance(error, LinkError) else ""
            at_fault = [node for node in nodes if str(node.target) == op] or nodes
            return {node.name: failure_reason(node, error.id, error.explanation) for node in at_fault}
        return {
            node.name: failure_reason(node, failure.error_id, failure.explanation, failure.repro)
            for node in nodes
            if (failure := blamed.get(node.name)) is not None
        }

    def _culprits(self, error: Exception, args: Sequence[Any]) -> list[Culprit]:
        pipeline = self._builder.pipeline
        found = [self._graphs.specialize(args).graph, self._graphs.specialize_fold()]
        graphs = [graph for graph in found if graph is not None]
        if isinstance(error, (LoweringUnavailable, CompileUnavailable, CompileTimeout)):
            return []
        if isinstance(error, LoweringError):
            return [Culprit(node, why) for graph in graphs for node, why in pipeline.choice.list_failed(graph)]
        if isinstance(error, CompileError):
            return [culprit for graph in graphs for culprit in find_uncompilable(pipeline, graph)]
        return []


def find_uncompilable(pipeline: Pipeline, graph: Graph) -> list[Culprit]:
    """Finds the op with which XLA begins to fail on a graph. Returns its calls; none if the whole graph compiles."""
    failed: list[tuple[str, CompileError]] = []

    def compiles(part: Graph) -> bool:
        lowered = pipeline.lower(part)
        try:
            pipeline.client.compile(lowered.module, pipeline.options.compile_limits)
        except CompileError as error:
            failed.append((lowered.text, error))
            return False
        return True

    node = find_first_failing(graph, compiles)
    if node is None:
        return []
    text, error = failed[-1]
    repro = str(write_repro("XLA", text, str(error)))
    failure = CompilerFailure(str(node.target), error.id, error.explanation, repro)
    return [Culprit(same, failure) for same in equal_calls(graph, node)]


class PredictionChecked(torch.nn.Module):
    """A compiled part as a submodule of the partitioned graph.

    The result of an eager op may differ from its prediction at capture (the fake kernel of a custom op may be wrong, as
    some of torch's are). The part was compiled for the prediction: it runs in eager on any other argument.

    Args:
        function: the compiled part.
        module: its graph.
        made: the nodes of the partitioned graph that compute arguments of the part, by position.
        note: called once, with the reason why the part ran in eager.
    """

    def __init__(
        self,
        function: PartFunction,
        module: GraphModule,
        made: Mapping[int, Node],
        note: Callable[[FallbackReason], None],
    ) -> None:
        super().__init__()
        self._function = function
        self._module = module
        self._in_eager: PartFunction | None = None
        self._made = {i: n for i, n in made.items() if isinstance(n.meta.get("val"), torch.Tensor)}
        self._predicted = [(i, *_dtype_and_sizes(n.meta["val"])) for i, n in self._made.items()]
        self._note: Callable[[FallbackReason], None] | None = note
        self._returns_one = _returns_one(module)

    def forward(self, *args: Any) -> Any:
        for position, dtype, sizes in self._predicted:
            if not _is_as_predicted(args[position], dtype, sizes):
                return self._run_eager(position, args)
        results = self._function(args)
        return results[0] if self._returns_one else results

    def _run_eager(self, position: int, args: Sequence[Any]) -> Any:
        if self._note is not None:
            self._note(make_misprediction_reason(self._made[position], args[position]))
            self._note = None
        self._in_eager = self._in_eager or make_eager_function(self._module, Saved())
        results = self._in_eager(args)
        return results[0] if self._returns_one else results


def _returns_one(module: GraphModule) -> bool:
    """Whether a graph returns a bare value, as a part's graph with one result does; others return a tuple."""
    return isinstance(module.graph.output_node().args[0], Node)


def _dtype_and_sizes(predicted: torch.Tensor) -> tuple[torch.dtype, tuple[int | None, ...]]:
    """Returns the dtype and the sizes, None for a size that varies: those are read from the tensor at every call.

    A size that varied until `torch._check` fixed it is still a symbolic number.
    """
    return predicted.dtype, tuple(None if varies(size) else int(size) for size in predicted.shape)


def _is_as_predicted(given: torch.Tensor, dtype: torch.dtype, sizes: tuple[int | None, ...]) -> bool:
    return (
        given.dtype is dtype
        and given.dim() == len(sizes)
        and all(size is None or mine == size for mine, size in zip(given.shape, sizes, strict=True))
    )
