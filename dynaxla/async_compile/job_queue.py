"""The queue of programs to compile in the background: plain values, no threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynaxla.bucketing.shape_keys import ShapeKey

MAX_QUEUED = 128
"""Capacity of the queue: twice the programs that a part keeps by default. More jobs would be out of date by their turn."""

EXPIRY_S = 60.0
"""Seconds until a job is dropped that no call asks for again. A later call of its sizes adds it anew."""


@dataclass(slots=True, eq=False)
class CompileJob:
    """One program to compile.

    Attributes:
        part: the owner, a `JobOwner`; it may be gone by the job's turn.
        key: of the program.
        values: sizes of the first call that asked for it.
        arguments: descriptions of that call's arguments.
        asked: calls that asked for it.
        last_s: time of the last of these.
        awaited: whether a call waits for it; such a job is never dropped.
        tries: how often it was started.
        ended: set once it is compiled, failed or dropped.
    """

    part: weakref.ref[Any]
    key: ShapeKey
    values: tuple[int, ...]
    arguments: tuple[Any, ...]
    last_s: float
    asked: int = 1
    awaited: bool = False
    tries: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class JobQueue:
    """Jobs that wait. Not safe from several threads.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float], most: int = MAX_QUEUED, forgotten_s: float = EXPIRY_S) -> None:
        self._clock = clock
        self._most = most
        self._forgotten_s = forgotten_s
        self._waiting: list[CompileJob] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: CompileJob) -> list[CompileJob]:
        """Adds a job to the queue. Returns the jobs evicted to make room; `job` itself if it has the lowest priority."""
        self._waiting.append(job)
        if len(self._waiting) <= self._most:
            return []
        free = [each for each in self._waiting if not each.awaited]
        return self._drop([min(free, key=lambda each: (each.asked, each.last_s))] if free else [])

    def take(self) -> tuple[CompileJob | None, list[CompileJob]]:
        """Takes out the job of the highest priority, the oldest of equal ones. Returns it, and the expired jobs."""
        now = self._clock()
        dropped = self._drop([job for job in self._waiting if self._is_stale(job, now)])
        if not self._waiting:
            return None, dropped
        job = max(self._waiting, key=lambda each: (each.awaited, each.asked))
        self._waiting.remove(job)
        return job, dropped

    def drop_all(self) -> list[CompileJob]:
        """Takes out all jobs."""
        return self._drop(list(self._waiting))

    def _is_stale(self, job: CompileJob, now: float) -> bool:
        return job.part() is None or (not job.awaited and now - job.last_s > self._forgotten_s)

    def _drop(self, jobs: list[CompileJob]) -> list[CompileJob]:
        for job in jobs:
            self._waiting.remove(job)
        return jobs
