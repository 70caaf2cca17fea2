"""Compiling the parts of captured graphs for a target elsewhere, and collecting what comes out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.fx import Graph

from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.cache.key import Key
from dynaxla.cache.package import PackagedFile, PackageWriter
from dynaxla.errors import CompileError
from dynaxla.lowering.call_graph import CallGraph, GraphSharding
from dynaxla.mesh import Sharding, replicate
from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.pipeline import Pipeline
from dynaxla.precompile.mesh_plan import MeshPlan
from dynaxla.precompile.program_report import Kind, ProgramReport, Refusal
from dynaxla.programs.part_compiler import PartCompiler
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program import CompiledProgram, ProgramMetadata
from dynaxla.programs.specialization import BucketSpec, ProgramSpec
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.executable_cache import KIND, ExecutableCache
from dynaxla.runtime.topologies import read_result_shardings
from dynaxla.targets.chips import Chip
from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.uncomputed import UncomputedTensors

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class CollectedProgram:
    """A program under its key.

    Attributes:
        file: of the package, if one is written.
    """

    key: Key
    executable: Executable
    file: PackagedFile | None


@dataclass(frozen=True, slots=True)
class PackagingCache(ExecutableCache):
    """Executables of a target elsewhere, kept for as long as a package is made, and in it.

    Attributes:
        writer: of the package; None: there is none.
    """

    writer: PackageWriter | None = None
    made: dict[str, CollectedProgram] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return True

    def find(self, key: Key, client: Client, partitions: int = 1) -> Executable | None:
        made = self.made.get(key.digest)
        return None if made is None else made.executable

    def put(self, key: Key, executable: Executable, compile_s: float) -> None:
        """Raises CompileError if it is for a package, and cannot be serialized or written."""
        file = None
        if self.writer is not None:
            serialized = executable.serialize()
            if serialized is None:
                raise CompileError("the target's compiler cannot serialize the program, so no package can have it")
            try:
                file = self.writer.add(KIND, key, serialized, {"compile_s": round(compile_s, 3)})
            except OSError as error:
                raise CompileError(f"the program cannot be written into the package: {error}") from error
        self.made[key.digest] = CollectedProgram(key, executable, file)

    def of(self, executable: Executable) -> CollectedProgram | None:
        """What was kept of an executable."""
        return next((made for made in self.made.values() if made.executable is executable), None)


@dataclass(slots=True)
class Collector:
    """Compiles programs for one target and says what comes out.

    Attributes:
        chip: published figures of the target.
        sizes: the buckets of the call that is under way, by the names of the dims.
        plan: how programs are sharded over a mesh; None: they are for one device.
        programs, refused: so far.
    """

    chip: Chip | None
    executables: PackagingCache
    plan: MeshPlan | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    programs: list[ProgramReport] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    _numbers: int = 0

    def number(self) -> int:
        """The number of a new program."""
        self._numbers += 1
        return self._numbers - 1

    def compile(
        self,
        pipeline: Pipeline,
        graph: Graph,
        number: int,
        kind: Kind,
        padded: bool = False,
        shard: Callable[[CallGraph], GraphSharding] | None = None,
    ) -> Executable | None:
        """Compiles a program and reports it, or that it was refused, and then gives None.

        Args:
            shard: says how the program's arguments and results are sharded; None: it is for one device.

        Raises:
            ShardingError: an argument is not divided by its sharding.
        """
        name = f"program {number}" if kind == "program" else f"program {number} ({kind})"
        spent = CompileTiming()
        try:
            calls = pipeline.list_calls(graph)
            calls = calls if shard is None else replace(calls, sharding=shard(calls))
            executable = pipeline.compile_calls(calls, spent, fold=kind == "weights")
        except CompileError as error:
            logger.warning("%s at %s: %s", name, dict(self.sizes) or "its own sizes", error)
            self.refused.append(Refusal(name, self.sizes, error))
            return None
        made, cost = self.executables.of(executable), executable.cost()
        self.programs.append(
            ProgramReport(
                name=name,
                ops=sum(node.op == "call_function" for node in graph.nodes),
                lowering_s=spent.lowering_s,
                compile_s=spent.compile_s,
                flops=max(cost.get("flops", 0.0), 0.0),  # XLA says -1 where it does not know
                accessed_bytes=max(cost.get("bytes accessed", 0.0), 0.0),
                memory=executable.memory_use(),
                chip=self.chip,
                kind=kind,
                sizes=self.sizes,
                padded=padded,
                key=None if made is None else made.key.digest,
                file=None if made is None else made.file,
                devices=1 if calls.sharding is None else calls.sharding.mesh.size,
                collectives=() if calls.sharding is None else tuple(list_collectives(executable.hlo_text())),
                hlo_text=executable.hlo_text,
            )
        )
        return executable


@dataclass(frozen=True, slots=True)
class UncomputedResults:
    """In place of an executable: what its runs would give, without values or memory.

    Attributes:
        results: fake tensors of the executable's results.
        tensors: what runs give is among them.
        plan: notes how what runs give is sharded; None without a mesh.
        shardings: of the results; empty without a mesh.
    """

    results: tuple[torch.Tensor, ...]
    tensors: UncomputedTensors
    plan: MeshPlan | None = None
    shardings: tuple[Sharding | None, ...] = ()

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        with self.tensors.mode:
            made = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in self.results]
        for tensor, sharding in zip(made, self.shardings, strict=False):
            if self.plan is not None and sharding is not None:
                self.plan.put(tensor, sharding)
        return made


class ReportingCompiler(PartCompiler):
    """Compiles the programs of one part for a target elsewhere, and reports them. They are not loaded.

    Args:
        tensors: the results of calls are among them.

    Attributes:
        arguments: of the call that is under way.
    """

    def __init__(
        self, graphs: PartGraphs, pipeline: Pipeline, collector: Collector, tensors: UncomputedTensors
    ) -> None:
        super().__init__(graphs, pipeline)
        self._collector = collector
        self._tensors = tensors
        self._is_first = True
        self.arguments: Sequence[Any] = ()

    def compile(self, spec: ProgramSpec, timing: CompileTiming) -> CompiledProgram:
        """
        Raises:
            CannotPad: padding could change a result.
        """
        static, outline = self.specialize(spec, timing)
        number = self._collector.number()
        if self._is_first:
            self._is_first = False
            fold = self.graphs.specialize_fold()
            if fold is not None:
                shard = None if self._plan is None else self._shard_fold
                self._collector.compile(self.pipeline, fold, number, "weights", shard=shard)
        results = tuple(node.meta["val"] for node in static.graph.output_node().args[0])  # type: ignore[union-attr, misc]
        if not results:
            return CompiledProgram(None, outline)
        kind: Kind = "backward" if self.graphs.saved.inputs else "program"
        shard = None if self._plan is None else partial(self._shard, outline)
        made = self._collector.compile(self.pipeline, static.graph, number, kind, isinstance(spec, BucketSpec), shard)
        found = () if self._plan is None or made is None else read_result_shardings(made, results, self._plan.mesh)
        stand_in = UncomputedResults(results, self._tensors, self._plan, found)
        return CompiledProgram(cast(Executable, stand_in), outline)  # calls need its `run` alone

    @property
    def _plan(self) -> MeshPlan | None:
        return self._collector.plan

    def _shard(self, outline: ProgramMetadata, calls: CallGraph) -> GraphSharding:
        """How a program is sharded as a live process shards it: results as XLA chooses, but new values as the old ones."""
        assert self._plan is not None
        facts, plan = self.graphs.facts, self._plan
        first = len(facts.origins) - len(facts.free)
        origins = [*facts.origins[:first], *(facts.free[i] for i in facts.free_tensors)]
        given = [self.arguments[origin] if isinstance(origin, int) else origin for origin in origins]
        inputs = tuple(
            replicate(plan.mesh, len(spec.shape)) if tensor is None else plan.find(tensor, order, spec.shape)
            for tensor, order, spec in zip_longest(given, outline.orders, calls.inputs.values())
        )
        results: list[Sharding | None] = [None] * len(calls.results)
        for argument, result in calls.donated.items():
            results[result] = inputs[argument]
        return GraphSharding(plan.mesh, inputs, tuple(results))

    def _shard_fold(self, calls: CallGraph) -> GraphSharding:
        """How the work on weights alone is sharded: its results are on every device."""
        assert self._plan is not None
        facts, plan = self.graphs.facts, self._plan
        held = [*(self.arguments[position] for position in facts.weights), *facts.constants]
        given = ((held[i], facts.orders[i]) for i in facts.folded)
        inputs = tuple(plan.find(*each, spec.shape) for each, spec in zip(given, calls.inputs.values(), strict=True))
        return GraphSharding(plan.mesh, inputs, tuple(replicate(plan.mesh, len(s.shape)) for s in calls.result_specs))


class CompileOnlyPart:
    """A part that is compiled for a target elsewhere, for every bucket or exact shape that is called. Its results are
    uncomputed.

    The programs are those that a `CompiledPart` has for the same calls.
    """

    def __init__(
        self,
        graphs: PartGraphs,
        pipeline: Pipeline,
        policies: SymbolPolicies,
        collector: Collector,
        tensors: UncomputedTensors,
    ) -> None:
        self._compiler = ReportingCompiler(graphs, pipeline, collector, tensors)
        self._programs = PartPrograms(self._compiler, policies, capacity=sys.maxsize)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        keys = self._programs.keys
        values = keys.read(args)
        program = self._programs.get(keys.of(values))
        if program is None:
            self._compiler.arguments = args
            with disable_modes():  # the constants of a graph are real
                program = self._programs.compile(keys.of(values), values, args)
        tensors = [] if program.executable is None else program.executable.run(())
        outputs = [source.output(tensors, args) for source in program.outputs]
        cropping = program.cropping
        return outputs if cropping is None else cropping.crop(outputs, cropping.pick(values))
