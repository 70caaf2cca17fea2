"""Compiling the parts of captured graphs for a target elsewhere, and collecting what comes out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.bucketing.shape_keys import Key as Sizes
from dynaxla.bucketing.shape_keys import Keys
from dynaxla.bucketing.size_buckets import Policies
from dynaxla.cache.key import Key
from dynaxla.cache.package import PackagedFile, PackageWriter
from dynaxla.diagnostics import ExactShape
from dynaxla.errors import CompileError, UnsupportedError
from dynaxla.observe.compile_timing import Spent
from dynaxla.pipeline import Pipeline
from dynaxla.precompile.program_report import Kind, ProgramReport, Refusal
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.executable_cache import KIND, KeptExecutables
from dynaxla.targets.chips import Chip
from dynaxla.types import StaticGraph

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class Made:
    """A program under its key.

    Attributes:
        file: of the package, if one is written.
    """

    key: Key
    executable: Executable
    file: PackagedFile | None


@dataclass(frozen=True, slots=True)
class PackagingCache(KeptExecutables):
    """Executables of a target elsewhere, kept for as long as a package is made, and in it.

    Attributes:
        writer: of the package; None: there is none.
    """

    writer: PackageWriter | None = None
    made: dict[str, Made] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return True

    def find(self, key: Key, client: Client) -> Executable | None:
        made = self.made.get(key.digest)
        return None if made is None else made.executable

    def put(self, key: Key, executable: Executable, compile_s: float) -> None:
        """Raises CompileError if it is for a package, and cannot be serialized or written."""
        file = None
        if self.writer is not None:
            serialized = executable.serialized()
            if serialized is None:
                raise CompileError("the target's compiler cannot serialize the program, so no package can have it")
            try:
                file = self.writer.add(KIND, key, serialized, {"compile_s": round(compile_s, 3)})
            except OSError as error:
                raise CompileError(f"the program cannot be written into the package: {error}") from error
        self.made[key.digest] = Made(key, executable, file)

    def of(self, executable: Executable) -> Made | None:
        """What was kept of an executable."""
        return next((made for made in self.made.values() if made.executable is executable), None)


@dataclass(slots=True)
class Collector:
    """Compiles programs for one target and says what comes out.

    Attributes:
        chip: published figures of the target.
        sizes: the buckets of the call that is under way, by the names of the dims.
        programs, refused: so far.
    """

    chip: Chip | None
    kept: PackagingCache
    sizes: Mapping[str, int] = field(default_factory=dict)
    programs: list[ProgramReport] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    _numbers: int = 0

    def number(self) -> int:
        """The number of a new program."""
        self._numbers += 1
        return self._numbers - 1

    def compile(self, pipeline: Pipeline, graph: Graph, number: int, kind: Kind, padded: bool = False) -> None:
        """Compiles a program and reports it, or that it was refused."""
        name = f"program {number}" if kind == "program" else f"program {number} ({kind})"
        spent = Spent()
        try:
            executable = pipeline.compile(graph, spent, fold=kind == "weights")
        except CompileError as error:
            logger.warning("%s at %s: %s", name, dict(self.sizes) or "its own sizes", error)
            self.refused.append(Refusal(name, self.sizes, error))
            return
        made, cost = self.kept.of(executable), executable.cost()
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
            )
        )


class CompileOnlyPart:
    """A part that is compiled for a target elsewhere, for every bucket or exact shape that is called, and computed here, in
    eager.

    The programs are those that a `CompiledPart` has for the same calls.
    """

    def __init__(self, graphs: PartGraphs, pipeline: Pipeline, policies: Policies, collector: Collector) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._collector = collector
        bucketed = bool(graphs.sizes) and pipeline.options.bucketing != "off"
        sizing = graphs.find_sizing(policies) if bucketed else None
        self._seen: set[Sizes] = set()
        self._keys = Keys(graphs.sizes, sizing, lambda: self._seen)
        self._is_new = True
        if bucketed and sizing is None:
            self._report(
                ExactShape("the graph", "a size that varies does not follow from any one of its inputs' sizes")
            )

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        sizes = self._keys.of(self._keys.read(args))
        if sizes not in self._seen:
            self._compile(sizes, args)
        return self._graphs.run_eager(args)

    def _compile(self, sizes: Sizes, args: Sequence[Any]) -> None:
        with self._pipeline.tracing:
            static = self._padded(sizes)
            padded = static is not None
            if static is None:
                static = self._graphs.specialize(args)
                self._graphs.donated(static)
        self._seen.add(self._keys.of(self._keys.read(args)))
        number = self._collector.number()
        if self._is_new:
            self._is_new = False
            fold = self._graphs.specialize_fold()
            if fold is not None:
                self._collector.compile(self._pipeline, fold, number, "weights")
        if any(source.result is not None for source in static.outputs):
            kind: Kind = "backward" if self._graphs.saved.inputs else "program"
            self._collector.compile(self._pipeline, static.graph, number, kind, padded)

    def _padded(self, sizes: Sizes) -> StaticGraph | None:
        sizing = self._keys.sizing_of(sizes)
        if sizing is None:
            return None
        try:
            static, _, _ = self._graphs.pad(sizing.at(self._keys.bucket_of(sizes)), sizing.order)
            self._graphs.donated(static)
            return static
        except CannotPad as error:
            self._report(error.reason)
            if error.of_bucket:
                self._keys.exclude(sizes)
            else:
                self._keys.exclude_sizing(sizes)
            return None

    def _report(self, reason: ExactShape) -> None:
        if self._pipeline.options.bucketing == "require":
            raise UnsupportedError(reasons=(reason,))
        self._pipeline.recorder.note_exact_shape(str(reason))
        logger.warning("%s", reason)
