"""The programs of one part that its calls need and that are not there: requested from the children, and added.

Until then a larger program or eager serves the call: what their runs cost decides.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import CompileReply, CompileRequest, PaddingRefused, SerializedPart, pack_spec
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.options import Limits
from dynaxla.programs.outline_pickling import CannotSerialize
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program import CompiledProgram
from dynaxla.programs.program_cache import ProgramListener
from dynaxla.programs.specialization import ArgumentSpec, empty_arguments
from dynaxla.runtime import xla
from dynaxla.runtime.pjrt_clients import CpuClient

logger = logging.getLogger("dynaxla")

MAX_PADDING = 2.0
"""Where nothing is measured yet: a larger bucket serves if it has at most so many elements for each of the call's. Its program
does about an eager run's work in about half the time, where ops are fused."""

MAX_EAGER_SIZES = 256
"""Of so many sizes the seconds in eager are remembered."""


class CostModel(ProgramListener):
    """Seconds of one part's runs, by what they ran. The best is kept: what was slower waited for something else.

    The first run of a program, and the first in eager, prepare more than they run: they are left out. Any thread may call
    any method; an observation that is lost is no loss.
    """

    def __init__(self) -> None:
        self._programs: dict[ShapeKey, float | None] = {}
        self._eager: dict[int, float] = {}
        self._elements: tuple[int, ...] = ()
        self._ran_in_eager = False

    def note_program(self, key: ShapeKey, seconds: float) -> None:
        """A run of the program with this key."""
        if key not in self._programs:
            self._programs[key] = None
            return
        best = self._programs[key]
        self._programs[key] = seconds if best is None else min(best, seconds)

    def note_eager(self, elements: int, seconds: float) -> None:
        """A run in eager.

        Args:
            elements: the product of the call's sizes.
        """
        if not self._ran_in_eager:
            self._ran_in_eager = True
        elif elements in self._eager or len(self._eager) < MAX_EAGER_SIZES:
            self._eager[elements] = min(self._eager.get(elements, seconds), seconds)
            self._elements = tuple(sorted(self._eager))

    def on_evict(self, key: ShapeKey) -> None:
        """Drops the program's seconds; another program may come in its place."""
        self._programs.pop(key, None)

    def prefers_program(self, key: ShapeKey, padded: int, elements: int) -> bool:
        """Whether the program of a larger bucket is taken for a call, and not eager.

        Args:
            padded: the product of the bucket's sizes.
            elements: the product of the call's.
        """
        program_s, eager_s = self._programs.get(key), self._in_eager(elements)
        if program_s is None or eager_s is None:
            return padded <= MAX_PADDING * elements
        return program_s <= eager_s

    def _in_eager(self, elements: int) -> float | None:
        """About what eager takes: between two sizes that were seen, in proportion; above the largest one, likewise."""
        seen = self._elements
        if not seen:
            return None
        place = bisect.bisect_left(seen, elements)
        if place == len(seen):
            return self._eager[seen[-1]] * elements / max(seen[-1], 1)
        above = self._eager[seen[place]]
        if place == 0 or seen[place] == elements:
            return above
        low, high, below = seen[place - 1], seen[place], self._eager[seen[place - 1]]
        return below + (above - below) * (elements - low) / (high - low)


_PADDING_S = 120.0
"""Seconds that a child may take for a job beside lowering and XLA."""


class PartCompileClient:
    """Has programs of one part compiled by children, and adds what they compiled. Safe from several threads.

    Attributes:
        costs: seconds of the part's runs.
        limits: of what a child may take for a program.
    """

    def __init__(self, programs: PartPrograms, service: CompileService) -> None:
        self.costs = CostModel()
        self._compiler = programs.compiler
        options = self._compiler.pipeline.options
        seconds = options.lowering_timeout_s + options.compile_timeout_s + _PADDING_S
        self.limits = Limits(seconds, options.compiler_memory_bytes)
        self._programs = programs
        self._service = service
        self._serialized: SerializedPart | CannotSerialize | None = None
        self._pending: dict[ShapeKey, CompileJob] = {}
        self._failed: set[ShapeKey] = set()
        self._has_told = False
        self._lock = new_lock()
        notify_after_fork(self)

    def after_fork(self) -> None:
        self._pending = {}

    @property
    def is_sharded(self) -> bool:
        """Whether the part's arguments may be sharded: then no child compiles it."""
        return self._compiler.is_sharded

    def check_serializable(self) -> None:
        """Raises CannotSerialize where no child can compile the part."""
        self._serialize()

    def ask(
        self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any], *, awaited: bool = False, calls: int = 1
    ) -> CompileJob | None:
        """Has the program of a call compiled. Returns the job; None if it failed before.

        Args:
            awaited: whether the call waits for it.
            calls: how many calls ask for it.
        """
        with self._lock:
            if key in self._failed:
                return None
            job = self._pending.get(key)
            if job is not None:
                job.asked, job.last_s = job.asked + calls, time.monotonic()
                job.awaited = job.awaited or awaited
                return job
            described = tuple(map(ArgumentSpec.of, args))
            job = CompileJob(weakref.ref(self), key, values, described, time.monotonic(), calls, awaited)
            self._pending[key] = job
        self._service.submit(job)
        return job

    def load(self, job: CompileJob) -> bool:
        """Loads the program from disk, if an earlier process stored it."""
        if not self._programs.load(job.key, job.values, job.arguments):
            return False
        self._compiler.pipeline.recorder.add(jobs_done=1)
        return True

    def expire_unneeded(self) -> None:
        """Lets jobs expire that nothing waits for, and whose calls have other keys by now."""
        with self._lock:
            pending = list(self._pending.values())
        for job in pending:
            if self._programs.keys.of(job.values) != job.key:
                job.last_s = -math.inf

    def request(self, job: CompileJob, whole: bool) -> CompileRequest:
        """The request to a child.

        Raises:
            CannotShip: the part has to be compiled here.
        """
        serialized, options = self._serialize(), self._compiler.pipeline.options
        precision = (options.precision or "default").lower()
        precise = cast(Literal["default", "high", "highest"], precision)
        return CompileRequest(
            digest=serialized.digest,
            part=serialized if whole else None,
            spec=pack_spec(self._programs.spec_of(job.key, job.arguments)),
            fold=self._compiler.lacks_fold,
            options=replace(options, buckets=None, matmul_precision=precise),
            default_dtype=torch.get_default_dtype(),
            jax=dict(xla.settings()),
        )

    def accept(self, job: CompileJob, reply: CompileReply) -> bool:
        """Adds what a child compiled. Returns whether the call's sizes still have that key."""
        client = self._compiler.pipeline.client
        if reply.fold is not None:
            self._compiler.fold = client.load(reply.fold)
        if not self._programs.keys.takes(job.key, job.values):
            return False  # it was found meanwhile that sizes differ which were equal, or that the part cannot be padded
        executable = None if reply.executable is None else client.load(reply.executable)
        self._programs.put(job.key, CompiledProgram(executable, reply.outline), job.values)
        return True

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        self._programs.refuse(job.key, refusal.reason, of_bucket=refusal.of_bucket)

    def compile_here(self, job: CompileJob, why: str) -> None:
        """Compiles in this thread.

        Raises:
            DynaxlaError: as `Pipeline.compile`.
        """
        self._stay_here(why)
        self._programs.compile(job.key, job.values, empty_arguments(job.arguments))

    def end(self, job: CompileJob, *, again: bool) -> None:
        """Ends a job; `again` says whether a call may ask for it again."""
        with self._lock:
            if self._pending.get(job.key) is job:
                del self._pending[job.key]
            if not again:
                self._failed.add(job.key)
        job.ended.set()

    def _serialize(self) -> SerializedPart:
        if self._serialized is None:
            try:
                self._serialized = self._serialize_part()
            except CannotSerialize as error:
                self._serialized = error
        if isinstance(self._serialized, CannotSerialize):
            raise self._serialized
        assert self._serialized is not None
        return self._serialized

    def _stay_here(self, why: str) -> None:
        """Has the part compiled in this process from now on, and logs why, once."""
        self._serialized = CannotSerialize(why)
        if not self._has_told:
            self._has_told = True
            line = (
                f"a part of {self._compiler.pipeline.origin.what} is compiled behind the calls in this process: {why}"
            )
            self._compiler.pipeline.recorder.note(unshipped=line)
            logger.warning("%s", line)

    def _serialize_part(self) -> SerializedPart:
        pipeline = self._compiler.pipeline
        if not isinstance(pipeline.client, CpuClient):
            raise CannotSerialize(
                f"the compiler of {pipeline.client.platform} needs the device, which this process holds"
            )
        if pipeline.dump.enabled:
            raise CannotSerialize("it is to be dumped")
        with pipeline.tracing:
            return SerializedPart.of(self._compiler.graphs, pipeline.choice.table, pipeline.options.fold_parameters)
