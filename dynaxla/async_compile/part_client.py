"""The programs of one part that its calls need and that are not there: requested from the children, and added."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from dynaxla.async_compile.cost_model import CostModel
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import CompileReply, CompileRequest, PaddingRefused, SerializedPart, pack_spec
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.options import Limits
from dynaxla.programs.outline_pickling import CannotSerialize
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program import CompiledProgram
from dynaxla.programs.specialization import ArgumentSpec, empty_arguments
from dynaxla.runtime import xla
from dynaxla.runtime.pjrt_clients import CpuClient

logger = logging.getLogger("dynaxla")


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
        self._lock = new_lock()
        notify_after_fork(self)

    def after_fork(self) -> None:
        self._pending = {}

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
                self._stay_here(str(error))
        if isinstance(self._serialized, CannotSerialize):
            raise self._serialized
        assert self._serialized is not None
        return self._serialized

    def _stay_here(self, why: str) -> None:
        """Has the part compiled in this process from now on, and logs why, once."""
        if not isinstance(self._serialized, CannotSerialize):
            self._serialized = CannotSerialize(why)
            line = (
                f"a part of {self._compiler.pipeline.origin.what} is compiled behind the calls in this process: {why}"
            )
            self._compiler.pipeline.recorder.note_unshipped(line)
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
