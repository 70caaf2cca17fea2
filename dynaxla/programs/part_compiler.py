"""Compiles the programs of one part: at a bucket, at exact sizes, and of what its weights alone determine.

The caller's process, the compile child and a compile for a target elsewhere all compile parts by this class.
"""

from __future__ import annotations

import time

from torch.fx import Graph

from dynaxla.cache.key import Key
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.pipeline import Pipeline
from dynaxla.programs.metadata import MetadataCache
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import CompiledProgram, ProgramMetadata
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

    @property
    def lacks_fold(self) -> bool:
        """Whether the part has work on weights alone whose program is neither loaded nor compiled yet."""
        return bool(self.graphs.facts.folds) and self.fold is None

    def find(self, spec: ProgramSpec) -> CompiledProgram | None:
        """The program of a bucket or of exact sizes, if it is on disk."""
        metadata = self._metadata()
        return self._find(metadata, metadata.key(self.graphs, spec))

    def compile(self, spec: ProgramSpec, timing: CompileTiming) -> CompiledProgram:
        """The program of a bucket or of exact sizes: loaded from disk, or compiled.

        Raises:
            CannotPad: padding could change a result.
            LoweringError, LinkError, CompileError: see `Pipeline.compile`.
        """
        metadata = self._metadata()
        key = metadata.key(self.graphs, spec)
        found = self._find(metadata, key)
        if found is not None:
            return found
        static, outline = self.specialize(spec, timing)
        computes = any(
            source.result is not None for source in outline.outputs
        )  # else all are arguments or plain values
        compiled = CompiledProgram(self.pipeline.compile(static.graph, timing) if computes else None, outline)
        if key is not None:
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
        if self.fold is None:
            self.fold = self._find_fold() or self.pipeline.find(self._fold_graph(), fold=True)
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

    def _find(self, metadata: MetadataCache, key: Key | None) -> CompiledProgram | None:
        """The stored program; None too where stages are dumped, which only a compile does."""
        found = None if self.pipeline.dump.enabled else metadata.find(key)
        if found is not None and found.executable is not None:
            self.pipeline.recorder.add(loads=1)
        return found

    def _find_fold(self) -> Executable | None:
        """The fold that is stored under the part's name, for which its graph is not needed."""
        metadata = self._metadata()
        found = None if self.pipeline.dump.enabled else metadata.find(metadata.fold_key(self.graphs))
        if found is not None:
            self.pipeline.recorder.add(fold_loads=1)
        return None if found is None else found.executable

    def _compile_fold(self, timing: CompileTiming) -> Executable:
        graph, metadata = self._fold_graph(), self._metadata()
        executable = self.pipeline.compile(graph, timing, fold=True)
        key = metadata.fold_key(self.graphs)
        if key is not None:
            metadata.put(key, CompiledProgram(executable, ProgramMetadata((), ())), self.pipeline.key_of(graph))
        return executable

    def _fold_graph(self) -> Graph:
        with self.pipeline.tracing:
            graph = self.graphs.specialize_fold()
        assert graph is not None
        return graph
