"""The programs of one part that earlier processes had: loaded behind the calls, before a call wants them."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import PaddingRefused
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.shape_keys import Key, Keys
from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key as StoreKey
from dynaxla.errors import BucketError
from dynaxla.isolation.forking import new_lock
from dynaxla.options import Limits
from dynaxla.pipeline import Pipeline
from dynaxla.programs.outline_pickling import CannotShip
from dynaxla.programs.part_graphs import PartGraphs

KIND = "sizes"
MAX_SIZES = 32
"""Sizes that are remembered of a part. A loaded program of a small encoder takes 10 MB; a stream needs some 20 buckets."""

Values = tuple[int, ...]


class Part(Protocol):
    """What keeps the programs."""

    def recall(self, key: Key, values: Values, arguments: Sequence[Any]) -> bool:
        """Whether the program of these sizes is there, or was on disk and now is. Raises CompileError."""
        ...


class ProgramPrefetcher:
    """Remembers which sizes a part's programs are for, and in a later process has these programs loaded.

    That process's first call finds its own; the others come behind the calls, those that were made last first. Where a part is
    known before anything was called, the last is loaded ahead. Any thread may call any method.
    """

    limits = Limits(0.0, 0)
    """A child is asked nothing."""

    def __init__(self, part: Part, graphs: PartGraphs, pipeline: Pipeline, keys: Keys, behind: CompileService) -> None:
        self._part = part
        self._keys = keys
        self._behind = behind
        self._store = pipeline.kept.store
        self._most = min(MAX_SIZES, pipeline.options.max_executables)
        name = graphs.name if self._store is not None and graphs.sizes else None
        self._name = None if name is None else StoreKey.of(part=name, versions=versions())
        self._earlier = self._found(len(graphs.sizes))
        self._here: list[Values] = []
        self._waiting: list[Values] | None = None
        self._likely = self._earlier[:1] if graphs.sizes else [()] if self._store is not None else []
        self._lock = new_lock()

    def note(self, values: Values) -> None:
        """There is a program for these sizes now."""
        if self._store is not None and self._name is not None:
            self._here = [values, *(each for each in self._here if each != values)]
            known = list(dict.fromkeys((*self._here, *self._earlier)))[: self._most]
            self._store.put(KIND, self._name, json.dumps(known).encode(), {"sizes": len(known)})

    def start_ahead(self) -> None:
        """Has the program loaded that the first call most likely wants: the last that was made, or the only one there is."""
        for values in self._likely:
            self._load(values)

    def start(self) -> None:
        """Has the programs of earlier processes loaded; called when this one has run the part."""
        if self._waiting is None:
            self._waiting = list(self._earlier)
            self._load_next()

    def _load_next(self) -> None:
        with self._lock:
            values = self._waiting.pop(0) if self._waiting else None
        if values is not None:
            self._load(values)

    def _load(self, values: Values) -> None:
        self._behind.ask(CompileJob(weakref.ref(self), (), values, (), time.monotonic(), asked=0))

    def _found(self, count: int) -> list[Values]:
        data = None if self._store is None or self._name is None else self._store.get(KIND, self._name)
        found = [] if data is None else json.loads(data)
        return [tuple(values) for values in found if len(values) == count]

    # What `CompileService` asks of it

    def recall(self, job: CompileJob) -> bool:
        """Loads a program; what is not on disk any more is left to the call that wants it."""
        with contextlib.suppress(BucketError):  # the policy is another one
            self._part.recall(self._keys.of(job.values), job.values, ())
        return True

    def request(self, job: CompileJob, whole: bool) -> object:
        raise CannotShip("nothing is compiled ahead of the calls")

    def take(self, job: CompileJob, reply: Any) -> bool:
        return False

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        """Nothing is padded."""

    def make_here(self, job: CompileJob, why: str) -> None:
        """Nothing is compiled."""

    def end(self, job: CompileJob, *, again: bool) -> None:
        job.ended.set()
        if again:
            self._load_next()
