"""Compiling for a device that is not here: what a model's graphs cost on a TPU, from a machine without one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from dynaxla.backend import GraphCompiler
from dynaxla.bucketing.sizing import Policies
from dynaxla.dispatch import PartFunction
from dynaxla.errors import CompileError, DynaxlaError
from dynaxla.options import Options
from dynaxla.pipeline import Pipeline
from dynaxla.process import process
from dynaxla.programs import PartGraphs
from dynaxla.runtime.client import CompileOnlyClient, MemoryUse
from dynaxla.targets.registry import compiler_for
from dynaxla.targets.target import Target
from dynaxla.torch_api.dynamo import BackendCompilerFailed, any_number_of_captures


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program, compiled for a target that is not here.

    Attributes:
        name: "program 0" and so on; the weight-only program of a part is "program 0 (weights)".
        ops: nodes of the ATen graph.
        lowering_s, compile_s: seconds in torch-mlir and JAX, and in the target's compiler.
        flops, accessed_bytes: XLA's cost analysis; 0 where it has none.
        memory: what the program needs on the chip.
        hbm_bytes: what the chip has.
    """

    name: str
    ops: int
    lowering_s: float
    compile_s: float
    flops: float
    accessed_bytes: float
    memory: MemoryUse
    hbm_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= self.hbm_bytes


def compile_for_target(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str,
    options: Mapping[str, object] | None = None,
) -> list[ProgramReport]:
    """Captures a call, compiles every graph of it for a TPU topology, and runs the graphs in eager to go on.

    Args:
        function: a module or function, as torch.compile takes it.
        args, kwargs: one call's arguments; the call is made once, without gradients.
        target: "tpu:<topology>", such as "tpu:v5e:1x1".
        options: the backend's options.

    Returns:
        One report per program, in the order in which the call met them. What the op table or torch-mlir refuses runs
        in eager with a logged reason, as it does without a target, and is in no report.

    Raises:
        OptionError: see `dynaxla.options.Options`.
        TargetError: no such topology, or libtpu is not installed.
        UnsupportedError: an op cannot be compiled, and the options say fallback="error".
        CompileError: the target's compiler refused a program; the first one, after all were tried.
    """
    parsed = Options.from_mapping(options)
    target_compiler = TargetCompiler(*compiler_for(target))

    def make_part(pipeline: Pipeline, policies: Policies) -> Callable[[PartGraphs], PartFunction]:
        return lambda graphs: CompileOnlyPart(graphs, pipeline, target_compiler)

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        compiler = GraphCompiler(
            process(), parsed, target=target_compiler.target, client=target_compiler.client, make_part=make_part
        )
        return compiler.compile(module, example_inputs)

    # Every call is a new backend to Dynamo, so calls for one module would add up to its limit, and then run in eager.
    try:
        with any_number_of_captures(), torch.no_grad():
            torch.compile(function, backend=backend)(*args, **(kwargs or {}))
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, DynaxlaError):
            raise error.inner_exception from None
        raise
    if target_compiler.refusals:
        raise target_compiler.refusals[0]
    return target_compiler.reports


@dataclass(frozen=True, slots=True)
class TargetCompiler:
    """Compiles graphs for one target and collects what comes out.

    Attributes:
        client: the target's compiler.
        reports: of the programs that compiled.
        refusals: errors of those that the target's compiler refused.
    """

    target: Target
    client: CompileOnlyClient
    reports: list[ProgramReport] = field(default_factory=list)
    refusals: list[CompileError] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def compile(self, pipeline: Pipeline, graphs: PartGraphs, args: Sequence[Any]) -> None:
        """Compiles a part at the sizes of these arguments, and its weight-only program."""
        name = f"program {next(self._numbers)}"
        fold = graphs.specialize_fold()
        try:
            if fold is not None:
                self.reports.append(self._compile(pipeline, f"{name} (weights)", fold))
            self.reports.append(self._compile(pipeline, name, graphs.specialize(args).graph))
        except CompileError as error:
            self.refusals.append(error)

    def _compile(self, pipeline: Pipeline, name: str, graph: Graph) -> ProgramReport:
        started = time.perf_counter()
        lowered = pipeline.lower(graph)
        lowered_at = time.perf_counter()
        compiled = self.client.compile_only(lowered.module)
        finished_at = time.perf_counter()
        if pipeline.dump.enabled:
            pipeline.dump.write("hlo", compiled.hlo_text())
        cost = compiled.cost()
        return ProgramReport(
            name=name,
            ops=sum(node.op == "call_function" for node in graph.nodes),
            lowering_s=lowered_at - started,
            compile_s=finished_at - lowered_at,
            flops=cost.get("flops", 0.0),
            accessed_bytes=cost.get("bytes accessed", 0.0),
            memory=compiled.memory_use(),
            hbm_bytes=self.target.memory_bytes or 0,
        )


class CompileOnlyPart:
    """A part that is compiled for a target elsewhere, once per distinct sizes, and computed here, in eager."""

    def __init__(self, graphs: PartGraphs, pipeline: Pipeline, target_compiler: TargetCompiler) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._target_compiler = target_compiler
        self._seen: set[tuple[int, ...]] = set()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        sizes = tuple(source.read(args) for source in self._graphs.sizes)
        if sizes not in self._seen:
            self._target_compiler.compile(self._pipeline, self._graphs, args)
            self._seen.add(sizes)
        return self._graphs.run_eager(args)
