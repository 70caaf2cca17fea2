"""The programs that one part's calls want and that are not there: asked for, brought back, or left to eager."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import torch

from dynaxla.async_compile.cost_model import CostModel
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import CompileReply, CompileRequest, PaddingRefused, SerializedPart, pack_spec
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.shape_keys import Key, Keys
from dynaxla.diagnostics import ExactShape
from dynaxla.isolation.forking import follow, new_lock
from dynaxla.options import Limits
from dynaxla.pipeline import Pipeline, matmul_precision
from dynaxla.programs.outline_pickling import CannotShip
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import Made
from dynaxla.programs.specialization import Argument, AtBucket, AtSizes, stand_ins
from dynaxla.runtime import xla
from dynaxla.runtime.client import Executable
from dynaxla.runtime.pjrt_clients import CpuClient

logger = logging.getLogger("dynaxla")


_PADDING_S = 120.0
"""How long a child may take for a job beside lowering and XLA."""


class Part(Protocol):
    """What keeps the programs."""

    @property
    def fold_is_missing(self) -> bool:
        """Whether work on weights alone is split off whose program is not there."""
        ...

    def keep_fold(self, fold: Executable) -> None: ...

    def keep_made(self, key: Key, made: Made, values: tuple[int, ...]) -> None: ...

    def recall(self, key: Key, values: tuple[int, ...], arguments: Sequence[Any]) -> bool:
        """Whether the program of these sizes is there, or was on disk and now is. Raises CompileError."""
        ...

    def refuse(self, key: Key, reason: ExactShape, *, of_bucket: bool) -> None: ...

    def make(self, key: Key, values: tuple[int, ...], args: Sequence[Any]) -> object: ...


class PartCompileClient:
    """What the calls of one part want. Safe from several threads.

    Attributes:
        costs: seconds of the part's runs.
        limits: of what a child may take for a program.
    """

    def __init__(self, part: Part, graphs: PartGraphs, pipeline: Pipeline, keys: Keys, behind: CompileService) -> None:
        self.costs = CostModel()
        options = pipeline.options
        seconds = options.lowering_timeout_s + options.compile_timeout_s + _PADDING_S
        self.limits = Limits(seconds, options.compiler_memory_bytes)
        self._part = part
        self._graphs = graphs
        self._pipeline = pipeline
        self._keys = keys
        self._behind = behind
        self._shipped: SerializedPart | CannotShip | None = None
        self._pending: dict[Key, CompileJob] = {}
        self._failed: set[Key] = set()
        self._lock = new_lock()
        follow(self)

    def after_fork(self) -> None:
        self._pending = {}

    def ask(
        self, key: Key, values: tuple[int, ...], args: Sequence[Any], *, awaited: bool = False, calls: int = 1
    ) -> CompileJob | None:
        """Has the program of a call made, or of so many calls, unless that failed before; the job."""
        with self._lock:
            if key in self._failed:
                return None
            job = self._pending.get(key)
            if job is not None:
                job.asked, job.last_s = job.asked + calls, time.monotonic()
                job.awaited = job.awaited or awaited
                return job
            described = tuple(map(Argument.of, args))
            job = CompileJob(weakref.ref(self), key, values, described, time.monotonic(), calls, awaited)
            self._pending[key] = job
        self._behind.ask(job)
        return job

    def recall(self, job: CompileJob) -> bool:
        """Takes the program from disk, as an earlier process left it."""
        if not self._part.recall(job.key, job.values, job.arguments):
            return False
        self._pipeline.recorder.add(jobs_done=1)
        return True

    def drop_unwanted(self) -> None:
        """Has programs left out that nothing waits for, and whose calls have other keys by now."""
        with self._lock:
            pending = list(self._pending.values())
        for job in pending:
            if self._keys.of(job.values) != job.key:
                job.last_s = -math.inf

    def request(self, job: CompileJob, whole: bool) -> CompileRequest:
        """What a child is asked.

        Raises:
            CannotShip: the part has to be compiled here.
        """
        shipped = self._ship()
        sizing = self._keys.sizing_of(job.key)
        bucket = self._keys.bucket_of(job.key)
        place = AtSizes(job.arguments) if sizing is None else AtBucket(sizing.at(bucket), sizing.order)
        precision = (matmul_precision(self._pipeline.options) or "default").lower()
        options = replace(
            self._pipeline.options,
            buckets=None,
            matmul_precision=cast(Literal["default", "high", "highest"], precision),
        )
        part = shipped if whole else None
        fold = self._part.fold_is_missing
        packed = pack_spec(place)
        return CompileRequest(
            shipped.digest, part, packed, fold, options, torch.get_default_dtype(), dict(xla.settings())
        )

    def take(self, job: CompileJob, reply: CompileReply) -> bool:
        """Keeps what a child made; whether the call's sizes still have that key."""
        client = self._pipeline.client
        if reply.fold is not None:
            self._part.keep_fold(client.load(reply.fold))
        if not self._keys.takes(job.key, job.values):
            return False  # it was found meanwhile that sizes differ which were equal, or that the part cannot be padded
        executable = None if reply.executable is None else client.load(reply.executable)
        self._part.keep_made(job.key, Made(executable, reply.outline), job.values)
        return True

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        self._part.refuse(job.key, refusal.reason, of_bucket=refusal.of_bucket)

    def make_here(self, job: CompileJob, why: str) -> None:
        """Compiles in this thread.

        Raises:
            DynaxlaError: as `Pipeline.compile`.
        """
        self._stay(why)
        self._part.make(job.key, job.values, stand_ins(job.arguments))

    def end(self, job: CompileJob, *, again: bool) -> None:
        """The job is over; `again` says whether a call may ask for it again."""
        with self._lock:
            if self._pending.get(job.key) is job:
                del self._pending[job.key]
            if not again:
                self._failed.add(job.key)
        job.ended.set()

    def _ship(self) -> SerializedPart:
        if self._shipped is None:
            try:
                self._shipped = self._packed()
            except CannotShip as error:
                self._stay(str(error))
        if isinstance(self._shipped, CannotShip):
            raise self._shipped
        assert self._shipped is not None
        return self._shipped

    def _stay(self, why: str) -> None:
        """Says, once, that the part is compiled in this process."""
        if not isinstance(self._shipped, CannotShip):
            self._shipped = CannotShip(why)
            line = f"a part of {self._pipeline.origin.what} is compiled behind the calls in this process: {why}"
            self._pipeline.recorder.note_unshipped(line)
            logger.warning("%s", line)

    def _packed(self) -> SerializedPart:
        pipeline = self._pipeline
        if not isinstance(pipeline.client, CpuClient):
            raise CannotShip(f"the compiler of {pipeline.client.platform} needs the device, which this process holds")
        if pipeline.dump.enabled:
            raise CannotShip("it is to be dumped")
        with pipeline.tracing:
            return SerializedPart.of(self._graphs, pipeline.choice.table, pipeline.options.fold_parameters)
