"""Compiles the programs of one part: at a bucket, at exact sizes, and of what its weights alone determine.

The caller's process, the compile child and a compile for a target elsewhere all compile parts by this class.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch.fx import Graph

from dynaxla.cache.key import Key
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.pipeline import Pipeline
from dynaxla.programs.metadata import MetadataCache
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import CompiledProgram, ProgramMetadata
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.programs.sharded_program import PartitionedPrograms, compile_for_devices, make_shardable
from dynaxla.programs.specialization import BucketSpec, ExactSpec, ProgramSpec
from dynaxla.runtime.client import Executable
from dynaxla.types import StaticGraph


class PartCompiler:
    """Finds or compiles the programs of one part. Holds none of them but the fold, which all of them share.

    Attributes:
        graphs: of the part.
        pipeline: compiles static graphs.
        fold: the program of the work that depends on weights alone; None until it is loaded or compiled.
    """

    def __init__(self, graphs: PartGraphs, pipeline: Pipeline) -> None:
        self.graphs = graphs
        self.pipeline = pipeline
        self.fold: Executable | None = None
        self._partitioned: PartitionedPrograms = ProgramCache(pipeline.options.max_executables, pipeline.recorder)

    @property
    def lacks_fold(self) -> bool:
        """Whether the part has work on weights alone whose program is neither loaded nor compiled yet."""
        return bool(self.graphs.facts.folds) and self.fold is None

    def find(self, spec: ProgramSpec) -> CompiledProgram | None:
        """The program of a bucket or of exact sizes, if it is on disk."""
        metadata = self._metadata()
        return self._find(metadata, metadata.key(self.graphs, spec), spec)

    def compile(self, spec: ProgramSpec, timing: CompileTiming) -> CompiledProgram:
        """The program of a bucket or of exact sizes: loaded from disk, or compiled.

        Raises:
            CannotPad: padding could change a result.
            LoweringError, LinkError, CompileError: see `Pipeline.compile`.
        """
        metadata = self._metadata()
        key = metadata.key(self.graphs, spec)
        found = self._find(metadata, key, spec)
        if found is not None:
            return found
        static, outline = self.specialize(spec, timing)
        computes = any(
            source.result is not None for source in outline.outputs
        )  # else all are arguments or plain values
        compiled = CompiledProgram(
            compile_for_devices(self.pipeline, static.graph, timing, kept=self._partitioned) if computes else None,
            outline,
        )
        if key is not None and not self.is_sharded:
            metadata.put(key, compiled, self.pipeline.key_of(static.graph) if computes else None)
        return compiled

    def specialize(self, spec: ProgramSpec, timing: CompileTiming) -> tuple[StaticGraph, ProgramMetadata]:
        """The part's graph at a bucket or at exact sizes, and what a program says of it beside the executable.

        Raises:
            CannotPad: padding could change a result.
        """
        if isinstance(spec, ExactSpec):
            with self.pipeline.tracing:
                static = self.graphs.specialize(spec.arguments)
                donated = self.graphs.find_donations(static)
            return static, ProgramMetadata(static.argument_orders, static.outputs, donated=donated)
        started = time.perf_counter()
        try:
            return self._pad(spec)
        finally:
            timing.padding_s += time.perf_counter() - started

    def find_fold(self) -> bool:
        """Loads the fold if it is on disk and not loaded yet; whether it is loaded. The part has one."""
        if self.fold is None and not self.is_sharded:
            self.fold = self._find_fold() or self._shardable_fold(self.pipeline.find(self._fold_graph(), fold=True))
        return self.fold is not None

    def compile_fold(self, timing: CompileTiming) -> Executable:
        """The fold: loaded from disk, or compiled. The part has one.

        Raises:
            LoweringError, LinkError, CompileError: see `Pipeline.compile`.
        """
        if self.fold is None:
            self.fold = self._find_fold() or self._compile_fold(timing)
        return self.fold

    def _pad(self, spec: BucketSpec) -> tuple[StaticGraph, ProgramMetadata]:
        with self.pipeline.tracing:
            static, shapes, cropping = self.graphs.pad(spec.buckets, spec.order)
            donated = self.graphs.find_donations(static)
        results = {result for _, result in donated}
        cropping = cropping.keep_outputs_whole(
            [i for i, source in enumerate(static.outputs) if source.result in results]
        ).share_repeated(static.outputs)
        return static, ProgramMetadata(static.argument_orders, static.outputs, shapes, cropping, donated)

    def _metadata(self) -> MetadataCache:
        pipeline = self.pipeline
        return MetadataCache(pipeline.executables, pipeline.client, pipeline.choice.table, pipeline.options)

    @property
    def is_sharded(self) -> bool:
        """Whether the part's arguments may be sharded, so that a call says what is compiled."""
        devices = self.pipeline.client.mesh_devices
        return devices is not None and devices.in_use

    def _find(self, metadata: MetadataCache, key: Key | None, spec: ProgramSpec) -> CompiledProgram | None:
        """The stored program for one device; None too where stages are dumped, which only a compile does."""
        found = None if self.pipeline.dump.enabled or self.is_sharded else metadata.find(key)
        if found is None or found.executable is None:
            return found
        self.pipeline.recorder.add(loads=1)
        made = make_shardable(
            self.pipeline,
            found.executable,
            lambda: self.specialize(spec, CompileTiming())[0].graph,
            self._partitioned,
        )
        return replace(found, executable=made)

    def _shardable_fold(self, executable: Executable | None) -> Executable | None:
        if executable is None:
            return None
        return make_shardable(self.pipeline, executable, self._fold_graph, self._partitioned, fold=True)

    def _find_fold(self) -> Executable | None:
        """The fold that is stored under the part's name, for which its graph is not needed."""
        metadata = self._metadata()
        skipped = self.pipeline.dump.enabled or self.is_sharded
        found = None if skipped else metadata.find(metadata.fold_key(self.graphs))
        if found is None:
            return None
        self.pipeline.recorder.add(fold_loads=1)
        return self._shardable_fold(found.executable)

    def _compile_fold(self, timing: CompileTiming) -> Executable:
        graph, metadata = self._fold_graph(), self._metadata()
        executable = compile_for_devices(self.pipeline, graph, timing, fold=True, kept=self._partitioned)
        key = metadata.fold_key(self.graphs)
        if key is not None and not self.is_sharded:
            metadata.put(key, CompiledProgram(executable, ProgramMetadata((), ())), self.pipeline.key_of(graph))
        return executable

    def _fold_graph(self) -> Graph:
        with self.pipeline.tracing:
            graph = self.graphs.specialize_fold()
        assert graph is not None
        return graph
