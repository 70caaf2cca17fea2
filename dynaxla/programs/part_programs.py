"""The programs of one part by the sizes of its calls: looked up, loaded or compiled; and which buckets cannot be padded."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.bucketing.recompile_warning import RecompileWarnings
from dynaxla.bucketing.shape_keys import EXACT, ShapeKey, ShapeKeys
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.diagnostics import ExactShape
from dynaxla.errors import UnsupportedError
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.programs.part_compiler import PartCompiler
from dynaxla.programs.program import CompiledProgram, Program
from dynaxla.programs.program_cache import ProgramCache, ProgramListener
from dynaxla.programs.specialization import BucketSpec, ExactSpec, ProgramSpec
from dynaxla.runtime.client import Executable
from dynaxla.runtime.pjrt_clients import CpuClient

logger = logging.getLogger("dynaxla")


USUAL_COMPILE_S = 0.5
"""Seconds of a compile, as long as none was measured."""


class PartPrograms:
    """The programs of one part. Safe from several threads, which compile different programs side by side.

    Args:
        compiler: of the part.
        policies: the buckets of its graph's sizes.
        capacity: programs kept at most; by default the option `max_executables`.
        adapts: whether buckets may be planned from the sizes of the calls.

    Attributes:
        keys: from a call's sizes to the key of its program.
        adapts_buckets: whether they are: where the options ask for it, and by default on the CPU, without a package, and unless
            results have to be the same in every call (`torch.use_deterministic_algorithms`): programs of two buckets may add
            in another order.
        compile_s: seconds of a compile, which a planned bucket has to have saved: the mean of the latest, without captures. 0
            with "learned", where no seconds are weighed.
        listeners: told of what is added and dropped.
        get, mark_used: those of the cache, called once per call of the part.
    """

    def __init__(
        self, compiler: PartCompiler, policies: SymbolPolicies, capacity: int | None = None, *, adapts: bool = False
    ) -> None:
        pipeline, graphs = compiler.pipeline, compiler.graphs
        options = pipeline.options
        self.compiler = compiler
        is_learned = options.buckets == "learned"
        self.adapts_buckets = adapts and not policies.chosen and (is_learned or self._adapts_by_default())
        self.compile_s = 0.0 if is_learned else USUAL_COMPILE_S
        self._compile_times: deque[float] = deque(maxlen=16)
        self.listeners: list[ProgramListener] = []
        self._warnings = RecompileWarnings(options, chosen=policies.chosen or is_learned)
        self._cache: ProgramCache[ShapeKey, Program] = ProgramCache(
            capacity or options.max_executables, pipeline.recorder
        )
        self.get, self.mark_used = self._cache.get, self._cache.mark_used
        is_bucketed = bool(graphs.sizes) and options.bucketing != "off"
        scheme = graphs.find_bucket_scheme(policies) if is_bucketed else None
        self.keys = ShapeKeys(graphs.sizes, scheme, self._cache.keys)
        self._is_first = True
        if is_bucketed and scheme is None:
            self._report_exact(
                ExactShape("the graph", "a size that varies does not follow from any one of its inputs' sizes")
            )

    def __len__(self) -> int:
        return len(self._cache)

    def __iter__(self) -> Iterator[ShapeKey]:
        return iter(self._cache.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def spec_of(self, key: ShapeKey, arguments: Sequence[Any]) -> ProgramSpec:
        """What the program of a key is compiled for: its bucket, or the exact sizes of a call's arguments."""
        return self._bucket(key) or ExactSpec(arguments)

    def compile(self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any]) -> Program:
        """The program of a call's sizes, compiled in this thread unless another one just did.

        Args:
            args: the call's, or tensors like them.

        Raises:
            LoweringError, LinkError, CompileError: see `Pipeline.compile`.
            UnsupportedError: it cannot be padded, and the options want everything padded.
        """
        with self._cache.lock(key):
            key = self.keys.of(values)  # another thread may just have found out that the part cannot be padded
            found = self.get(key)
            if found is not None:
                return found
            origin = self.compiler.pipeline.origin
            timing = CompileTiming(capture_s=origin.take_capture_s())
            compiled = self._compile_bucket(key, timing)
            if compiled is None:
                compiled = self.compiler.compile(ExactSpec(args), timing)
                key = self.keys.of(values)
            timing.tell(origin.what, self._explain_compile(key))
            if timing.compile_s and self.compile_s:
                self._compile_times.append(timing.padding_s + timing.lowering_s + timing.compile_s)
                self.compile_s = statistics.fmean(self._compile_times)
            return self.put(key, compiled, values)

    def load(self, key: ShapeKey, values: tuple[int, ...], arguments: Sequence[Any]) -> bool:
        """Loads the program of a call's sizes from disk, unless it is loaded. Returns whether it is loaded now.

        Raises:
            CompileError: it cannot be loaded.
        """
        with self._cache.lock(key):
            if key in self:
                return True
            if self.compiler.lacks_fold and not self.compiler.find_fold():
                return False
            found = self.compiler.find(self.spec_of(key, arguments))
            if found is not None:
                self.put(key, found, values)
        return found is not None

    def put(self, key: ShapeKey, compiled: CompiledProgram, values: tuple[int, ...]) -> Program:
        """Adds a program that was compiled or loaded for calls of these sizes."""
        program = self.compiler.graphs.facts.bind(compiled)
        evicted = self._cache.put(key, program, self._warnings.notices(self._cache.keys(), self.keys.describe))
        self.compiler.pipeline.recorder.add(evictions=len(evicted))
        self._cache.drop(self.keys.superseded_keys())
        self.keys.renew()
        for listener in self.listeners:
            for each in evicted:
                listener.on_evict(each)
            listener.on_put(values)
        return program

    def refuse(self, key: ShapeKey, reason: ExactShape, *, of_bucket: bool) -> None:
        """Compiles the sizes of a bucket exactly from now on, as padding them could change a result.

        Args:
            of_bucket: whether other buckets may still be padded.

        Raises:
            UnsupportedError: the options want everything padded.
        """
        self._report_exact(reason)
        if of_bucket:
            self.keys.exclude(key)
        else:
            self.keys.exclude_scheme(key)

    def compile_fold(self) -> Executable:
        """The program of the work that depends on weights alone. The part has such work."""
        timing = CompileTiming()
        executable = self.compiler.compile_fold(timing)
        timing.tell(self.compiler.pipeline.origin.what, "work on weights alone")
        return executable

    def _adapts_by_default(self) -> bool:
        pipeline = self.compiler.pipeline
        on_cpu = isinstance(pipeline.client, CpuClient) and pipeline.executables.bundle is None
        return on_cpu and pipeline.options.buckets is None and not torch.are_deterministic_algorithms_enabled()

    def _compile_bucket(self, key: ShapeKey, timing: CompileTiming) -> CompiledProgram | None:
        """The program of a bucket; None where the key is of exact sizes, or is found to be refused."""
        bucket = self._bucket(key)
        if bucket is None:
            return None
        try:
            return self.compiler.compile(bucket, timing)
        except CannotPad as error:
            self.refuse(key, error.reason, of_bucket=error.of_bucket)
            return None

    def _bucket(self, key: ShapeKey) -> BucketSpec | None:
        """The bucket of a key; None for exact sizes."""
        scheme = self.keys.scheme_of(key)
        return None if scheme is None else BucketSpec(scheme.make_bucket(self.keys.bucket_of(key)), scheme.order)

    def _explain_compile(self, key: ShapeKey) -> str:
        """Why a program was compiled, for the log."""
        is_first, self._is_first = self._is_first, False
        is_exact = key[:1] == (EXACT,)
        sizes = ", ".join(map(str, key[1:] if is_exact else self.keys.bucket_of(key)))
        why = f"a new {'exact shape' if is_exact else 'bucket'} of sizes {sizes}"
        if is_first or not key:
            why = "a new graph"
        refused = self._warnings.refused
        return f"{why}; {refused}" if is_exact and refused is not None else why

    def _report_exact(self, reason: ExactShape) -> None:
        """
        Raises:
            UnsupportedError: the options want everything padded.
        """
        if self.compiler.pipeline.options.bucketing == "require":
            raise UnsupportedError(reasons=(reason,))
        self._warnings.refused = reason
        self.compiler.pipeline.recorder.note(exact_shapes=str(reason))
        logger.warning("%s", reason)
