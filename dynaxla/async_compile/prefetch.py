"""The programs of one part that earlier processes compiled: loaded in the background, before a call needs them."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from typing import Any

from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import PaddingRefused
from dynaxla.async_compile.service import CompileService
from dynaxla.cache.environment_key import versions
from dynaxla.cache.kinds import SIZES
from dynaxla.errors import BucketError
from dynaxla.isolation.forking import new_lock
from dynaxla.options import Limits
from dynaxla.programs.outline_pickling import CannotSerialize
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program_cache import ProgramListener

KIND = SIZES.name
MAX_SIZES = 32
"""Sizes remembered per part. A loaded program of a small encoder takes 10 MB; a stream needs some 20 buckets."""

Values = tuple[int, ...]


class ProgramPrefetcher(ProgramListener):
    """Remembers which sizes a part's programs are for, and in a later process has these programs loaded.

    That process's first call finds its own; the others are loaded in the background, the last compiled first. Where a part is
    known before anything was called, the last is loaded before the first call. Any thread may call any method.
    """

    limits = Limits(0.0, 0)
    """A child is asked nothing."""

    def __init__(self, programs: PartPrograms, service: CompileService) -> None:
        graphs, pipeline = programs.compiler.graphs, programs.compiler.pipeline
        self._programs = programs
        self._service = service
        self._store = pipeline.executables.store
        self._capacity = min(MAX_SIZES, pipeline.options.max_executables)
        name = graphs.name if self._store is not None and graphs.sizes else None
        self._name = None if name is None else SIZES.key(part=name, versions=versions())
        self._earlier = self._read_stored(len(graphs.sizes))
        self._here: list[Values] = []
        self._queue: list[Values] | None = None
        self._likely = self._earlier[:1] if graphs.sizes else [()] if self._store is not None else []
        self._lock = new_lock()

    def on_put(self, values: Values) -> None:
        """Stores that there is a program for these sizes."""
        if self._store is not None and self._name is not None:
            self._here = [values, *(each for each in self._here if each != values)]
            known = list(dict.fromkeys((*self._here, *self._earlier)))[: self._capacity]
            self._store.put(KIND, self._name, json.dumps(known).encode(), {"sizes": len(known)})

    def load_likely(self) -> None:
        """Has the program loaded that the first call most likely needs: the last that was compiled, or the only one."""
        for values in self._likely:
            self._load(values)

    def on_waited(self) -> None:
        """Has the programs of earlier processes loaded, once this one has run the part."""
        if self._queue is None:
            self._queue = list(self._earlier)
            self._load_next()

    def _load_next(self) -> None:
        with self._lock:
            values = self._queue.pop(0) if self._queue else None
        if values is not None:
            self._load(values)

    def _load(self, values: Values) -> None:
        self._service.submit(CompileJob(weakref.ref(self), (), values, (), time.monotonic(), asked=0))

    def _read_stored(self, count: int) -> list[Values]:
        data = None if self._store is None or self._name is None else self._store.get(KIND, self._name)
        found = [] if data is None else json.loads(data)
        return [tuple(values) for values in found if len(values) == count]

    # As a `JobOwner`

    def load(self, job: CompileJob) -> bool:
        """Loads a program; what is not on disk any more is left to the call that needs it."""
        with contextlib.suppress(BucketError):  # the policy is another one
            self._programs.load(self._programs.keys.of(job.values), job.values, ())
        return True

    def request(self, job: CompileJob, whole: bool) -> object:
        raise CannotSerialize("nothing is compiled ahead of the calls")

    def accept(self, job: CompileJob, reply: Any) -> bool:
        return False

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        """Nothing is padded."""

    def compile_here(self, job: CompileJob, why: str) -> None:
        """Nothing is compiled."""

    def end(self, job: CompileJob, *, again: bool) -> None:
        job.ended.set()
        if again:
            self._load_next()
