"""Which programs are wanted, and which is made next: plain values, no threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynaxla.bucketing.shape_keys import Key

MAX_QUEUED = 128
"""Jobs that wait at most: twice what a part keeps by default. What is asked for beyond that is out of date by its turn."""

EXPIRY_S = 60.0
"""How long a job waits for which no call asks again. A size that comes back asks anew."""


@dataclass(slots=True, eq=False)
class CompileJob:
    """One program that is not there.

    Attributes:
        part: whose; it may be gone by the time of its turn.
        key: of the program.
        values: sizes of the call that asked first.
        arguments: what stands for those of that call.
        asked: how many calls wanted it.
        last_s: when the last of them did.
        awaited: whether somebody waits for it: then it is never dropped.
        tries: how often it was begun.
        ended: set when it is there, or will not be.
    """

    part: weakref.ref[Any]
    key: Key
    values: tuple[int, ...]
    arguments: tuple[Any, ...]
    last_s: float
    asked: int = 1
    awaited: bool = False
    tries: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class JobQueue:
    """Those that wait. Not safe from several threads.

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
        """Adds a job; gives those that have to leave for it, which may be this one."""
        self._waiting.append(job)
        if len(self._waiting) <= self._most:
            return []
        free = [each for each in self._waiting if not each.awaited]
        return self._drop([min(free, key=lambda each: (each.asked, each.last_s))] if free else [])

    def take(self) -> tuple[CompileJob | None, list[CompileJob]]:
        """The most wanted job, of those alike the one that waits longest; and those that nobody wants any more."""
        now = self._clock()
        dropped = self._drop([job for job in self._waiting if self._is_stale(job, now)])
        if not self._waiting:
            return None, dropped
        job = max(self._waiting, key=lambda each: (each.awaited, each.asked))
        self._waiting.remove(job)
        return job, dropped

    def drop_all(self) -> list[CompileJob]:
        """Takes out all of them."""
        return self._drop(list(self._waiting))

    def _is_stale(self, job: CompileJob, now: float) -> bool:
        return job.part() is None or (not job.awaited and now - job.last_s > self._forgotten_s)

    def _drop(self, jobs: list[CompileJob]) -> list[CompileJob]:
        for job in jobs:
            self._waiting.remove(job)
        return jobs
