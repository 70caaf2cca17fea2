"""Threads that have children compile what calls need, and hand the results to the parts. One service for the process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dynaxla.async_compile.job_queue import CompileJob, JobQueue
from dynaxla.async_compile.protocol import (
    Answer,
    CompileFailed,
    CompileReply,
    NotSerializable,
    PaddingRefused,
    PlanReply,
    UnknownPart,
    unpack_answer,
)
from dynaxla.errors import DynaxlaError
from dynaxla.isolation.children import ChildAbandoned, ChildError, ChildProcess
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.programs.outline_pickling import CannotSerialize

logger = logging.getLogger("dynaxla")

MAX_WORKERS = 4
MAX_TRIES = 2
"""A child may have died of something else, the system's want of memory say; of the same job twice it died of that."""


class JobOwner(Protocol):
    """A part whose calls need programs."""

    limits: Limits
    """Of a request."""

    def load(self, job: CompileJob) -> bool:
        """Loads what is on disk. Returns whether the job is done by that. Raises DynaxlaError."""
        ...

    def request(self, job: CompileJob, whole: bool) -> object:
        """The request to a child, with the part itself if `whole`. Raises CannotShip."""
        ...

    def accept(self, job: CompileJob, reply: Any) -> bool:
        """Takes over what a child made. Returns whether the calls still need it. Raises DynaxlaError."""
        ...

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        """Compiles these sizes otherwise from now on. Raises DynaxlaError where the options forbid that."""
        ...

    def compile_here(self, job: CompileJob, why: str) -> None:
        """Compiles in this thread. Raises DynaxlaError."""
        ...

    def end(self, job: CompileJob, *, again: bool) -> None:
        """Ends a job; `again` says whether a call may ask for it again."""
        ...


class CompileService:
    """Compiles in the background. Any thread may submit jobs at any time.

    Nothing is started before it is needed. Threads end when there is nothing to do, and when the main thread has ended:
    then the children are ended too. The children end when they are idle for some minutes, and with this process.

    Args:
        workers: children; by default one per two processor cores, at most 4.
    """

    def __init__(self, recorder: Recorder, workers: int | None = None, *, inject_faults: bool = False) -> None:
        count = workers or min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))
        self.children: Sequence[ChildProcess] = [
            ChildProcess("dynaxla.async_compile.worker", inject_faults=inject_faults) for _ in range(count)
        ]
        self._recorder = recorder
        self._jobs = JobQueue(time.monotonic)
        self._idle = list(self.children)
        self._lock = new_lock()
        notify_after_fork(self)

    def after_fork(self) -> None:
        """Empties the queue: a forked child has no threads. Its calls submit their jobs anew."""
        self._jobs = JobQueue(time.monotonic)
        self._idle = list(self.children)

    @property
    def idle(self) -> bool:
        """Whether no job waits or is under way."""
        with self._lock:
            return len(self._idle) == len(self.children)

    def start(self) -> None:
        """Starts a child, so that it has imported what it needs when the first job comes."""
        if self.children[0].pid is None and not self.children[0].busy:
            self.children[0].start()

    def submit(self, job: CompileJob) -> None:
        """Adds a job to the queue, and starts a thread for it if a child is idle."""
        with defer_interrupts():  # a child that is taken has to work
            with self._lock:
                dropped = self._jobs.add(job)
                child = self._idle.pop(0) if self._idle else None
            self._drop(dropped)
            if child is not None:
                self._begin(child)

    def _begin(self, child: ChildProcess) -> None:
        # Not a daemon: Python ends those in the middle of native code, and the process dies of it.
        thread = threading.Thread(target=self._work, args=(child,), name="dynaxla-compile")
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads: the caller waits
            self._work(child)

    def _work(self, child: ChildProcess) -> None:
        while True:
            with self._lock:
                job, dropped = (
                    self._jobs.take() if threading.main_thread().is_alive() else (None, self._jobs.drop_all())
                )
                if job is None:
                    self._idle.append(child)
            self._drop(dropped)
            if job is None:
                break
            self._do(job, child)
        if not threading.main_thread().is_alive():
            child.close()

    def _do(self, job: CompileJob, child: ChildProcess) -> None:
        part: JobOwner | None = job.part()
        if part is None:
            self._drop([job])
            return
        job.tries += 1
        try:
            again = part.load(job) or self._handle(job, part, self._request(job, part, child))
        except CannotSerialize as error:
            again = self._compile_here(job, part, str(error))
        except ChildAbandoned:
            again = True
            self._recorder.add(jobs_dropped=1)
        except ChildError as error:
            if job.tries < MAX_TRIES:
                logger.warning(
                    "the child that compiled the sizes %s gave no answer, and is asked again: %r", job.values, error
                )
                self.submit(job)
                return
            again = self._fail(job, f"its compiler gave no answer, twice: {error!r}")
        except Exception as error:  # the border of what nobody waits for, see partition/error_boundary.py
            again = self._fail(job, str(error), error)
        part.end(job, again=again)

    def _request(self, job: CompileJob, part: JobOwner, child: ChildProcess) -> Answer:
        limits = part.limits
        answer = unpack_answer(child.ask(part.request(job, whole=False), limits, _main_thread_ended))
        if isinstance(answer, UnknownPart):
            answer = unpack_answer(child.ask(part.request(job, whole=True), limits, _main_thread_ended))
        return answer

    def _handle(self, job: CompileJob, part: JobOwner, answer: Answer) -> bool:
        """Does what an answer says. Returns whether a call may ask for these sizes again."""
        if isinstance(answer, (CompileReply, PlanReply)):
            if isinstance(answer, CompileReply):
                self._recorder.add(**answer.counters)
                _log_lines(answer.log_lines)
            is_needed = part.accept(job, answer)
            self._recorder.add(**({"jobs_done": 1} if is_needed else {"jobs_dropped": 1}))
            return True
        if isinstance(answer, PaddingRefused):
            part.refuse(job, answer)
            self._recorder.add(jobs_done=1)
            return True
        if isinstance(answer, NotSerializable):
            raise CannotSerialize(answer.reason)
        assert isinstance(answer, CompileFailed)
        _log_lines(answer.log_lines)
        return self._fail(job, answer.explanation)

    def _compile_here(self, job: CompileJob, part: JobOwner, why: str) -> bool:
        try:
            part.compile_here(job, why)
        except Exception as error:  # the border of what nobody waits for, see partition/error_boundary.py
            return self._fail(job, str(error), error)
        self._recorder.add(jobs_done=1, jobs_here=1)
        return True

    def _fail(self, job: CompileJob, why: str, error: Exception | None = None) -> bool:
        unexpected = None if isinstance(error, DynaxlaError) else error
        logger.warning("the sizes %s stay without a program of their own: %s", job.values, why, exc_info=unexpected)
        self._recorder.add(jobs_failed=1)
        return False

    def _drop(self, jobs: Sequence[CompileJob]) -> None:
        for job in jobs:
            self._recorder.add(jobs_dropped=1)
            part: JobOwner | None = job.part()
            if part is None:
                job.ended.set()
            else:
                part.end(job, again=True)


def _main_thread_ended() -> bool:
    return not threading.main_thread().is_alive()


def _log_lines(lines: Sequence[str]) -> None:
    for line in lines:
        logger.warning("%s", line)
