"""The frame of every server: one worker thread that runs the model, and threads that submit requests to it."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

from dynaxla.errors import NotServing, QueueFull, RequestRejected
from dynaxla.isolation.forking import notify_after_fork
from dynaxla.serving.events import Outcome, RequestFinished, RequestObserver
from dynaxla.serving.lifecycle import State
from dynaxla.serving.request_queue import Request, RequestQueue

logger = logging.getLogger("dynaxla")

_NEWEST_WEIGHT = 0.2  # of the newest run in the average time per request

R = TypeVar("R", bound=Request)
Q = TypeVar("Q", bound=RequestQueue)


class WorkerServer(ABC, Generic[R, Q]):
    """Starts a worker, which prepares and then serves until the server is drained.

    Args:
        queue: of the requests that wait.
        observer: told of every request's end.
        clock: seconds, never going back.
        thread_name: of the worker.
    """

    def __init__(self, queue: Q, observer: RequestObserver, clock: Callable[[], float], thread_name: str) -> None:
        self._queue = queue
        self._clock = clock
        self._request_s = 0.0
        self._failure = ""
        self._request_observer = observer
        # Not a daemon: Python ends those in the middle of native code, and the process dies of it (SIGABRT).
        self._worker = threading.Thread(target=self._work, name=thread_name)
        notify_after_fork(self)

    def after_fork(self) -> None:
        self._queue.reset_after_fork()

    @property
    def state(self) -> State:
        return self._queue.state

    @property
    def queue_depth(self) -> int:
        """Requests that wait, those that are being run not counted."""
        return len(self._queue)

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drain()

    def start(self) -> None:
        """Starts the worker, which prepares and then serves. Returns at once.

        Raises:
            NotServing: it was started before.
        """
        if self._queue.advance(State.STARTING) is not State.NEW:
            raise NotServing(self.state)
        self._worker.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Waits until requests are accepted, at most `timeout_s` seconds.

        Raises:
            NotServing: it is not ready by then, the preparation failed, or the server is draining.
        """
        state = self._queue.wait_until_ready(timeout_s)
        if state is not State.SERVING:
            raise NotServing(state, self._failure)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, answers those that were accepted, and ends the worker. May be called again.

        Returns:
            Whether all were answered within `timeout_s` seconds. If not, those that wait are abandoned.
        """
        before = self._queue.advance(State.DRAINING)
        if before is State.NEW:
            self._queue.advance(State.CLOSED)
        if before.is_before_serving:
            return True  # nothing was accepted; a preparation under way is not waited for
        if threading.current_thread() is self._worker:
            return False
        self._worker.join(None if timeout_s == math.inf else timeout_s)
        if not self._worker.is_alive():
            return True
        self._give_up()
        return False

    def _work(self) -> None:
        try:
            self._prepare()
            self._queue.advance(State.SERVING)
            self._serve()
        except BaseException as error:  # whatever ended the worker: it is logged, and nobody is left waiting
            self._log_death(error)
            self._failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._queue.advance(State.BROKEN)
        finally:
            self._queue.advance(State.CLOSED)
            self._abandon_all()

    def _log_death(self, error: BaseException) -> None:
        logger.error("the worker of %s died", type(self).__name__, exc_info=error)

    @abstractmethod
    def _prepare(self) -> None:
        """Warms up, in the worker. If a drain comes first, `_serve` finds nothing to do."""

    @abstractmethod
    def _serve(self) -> None:
        """Answers requests, in the worker, until the server is draining and none waits."""

    @abstractmethod
    def _give_up(self) -> None:
        """Abandons requests after a drain that ran out of time, in the thread that drains; the worker still runs."""

    @abstractmethod
    def _abandon_all(self) -> None:
        """Fails every request that was accepted and has no answer, once the worker has ended."""

    @contextmanager
    def _count_refusals(self, count: int = 1) -> Iterator[None]:
        """Tells the observer of requests that are refused inside."""
        try:
            yield
        except (RequestRejected, QueueFull, NotServing) as error:
            for _ in range(count):
                self._request_observer.request_finished(RequestFinished(Outcome.of_refusal(error)))
            raise

    def _update_average(self, seconds: float) -> None:
        """Adds the newest time per request to the average by which clients are told when to try again."""
        self._request_s += _NEWEST_WEIGHT * (seconds - self._request_s)


def require_deadline(deadline_s: float) -> None:
    """Raises:
    RequestRejected: the deadline has passed already.
    """
    if not deadline_s > 0:
        raise RequestRejected(f"deadline_s={deadline_s!r} is not above 0", hint="give seconds above 0, or None")
