"""The loop: take the next batch, run it, reply. One worker thread runs the model; any thread may submit."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from dynaxla.errors import (
    DeadlineExceeded,
    NotServing,
    QueueFull,
    RequestRejected,
    RequestTooLarge,
    ServingError,
)
from dynaxla.isolation.forking import follow
from dynaxla.serving.batcher import Request
from dynaxla.serving.events import Answered, Observer, Outcome, Ran, Silent
from dynaxla.serving.lifecycle import State
from dynaxla.serving.queue import Queue
from dynaxla.serving.settings import Settings

logger = logging.getLogger("dynaxla")

Payload = TypeVar("Payload")
Result = TypeVar("Result")

_NEWEST = 0.2  # weight of the newest run in the average time per request


class Server(Generic[Payload, Result]):
    """Answers requests in batches of one bucket.

    Args:
        run: gives a result per payload, in order; all of one bucket, at most `settings.most_rows(bucket)`. If it raises,
            both halves of the batch are run again, down to single requests: only the guilty get the error.
        size_of: a payload's size, in elements of the dim that varies. May raise `RequestRejected` and say what is wrong.
        settings: how requests are batched and bounded.
        prepare: run by the worker before anything is accepted: the warm-up.
        observer: told of every run and every answer.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Payload]], Sequence[Result]],
        size_of: Callable[[Payload], int],
        settings: Settings,
        *,
        prepare: Callable[[], object] = lambda: None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._model = run
        self._size_of = size_of
        self._prepare = prepare
        self._observer = observer or Silent()
        self._clock = clock
        self._queue = Queue(settings, clock)
        self._batch: Sequence[Request] = ()
        self._request_s = 0.0
        # Not a daemon: Python ends those in the middle of native code, and the process dies of it (SIGABRT).
        self._worker = threading.Thread(target=self._work, name="dynaxla-serving")
        follow(self)

    def after_fork(self) -> None:
        self._queue.start_over()

    # What callers use

    @property
    def state(self) -> State:
        return self._queue.state

    @property
    def queue_depth(self) -> int:
        """Requests that wait, those in the running batch not counted."""
        return len(self._queue)

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drain()

    def start(self) -> None:
        """Starts the worker, which prepares and then serves; returns at once.

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
            raise NotServing(state)

    def submit(self, payload: Payload, deadline_s: float | None = None) -> Future[Result]:
        """Accepts a request; the future gives its result, or the error that it alone caused.

        Cancelling the future before its batch runs takes the request out of the queue.

        Args:
            payload: what `run` will be given.
            deadline_s: seconds from now, after which the answer is `DeadlineExceeded`; it comes at the latest when the
                batch that is running then has ended.

        Raises:
            RequestRejected, RequestTooLarge: it can never be served.
            QueueFull: too many are waiting; says when to try again.
            NotServing: the server is starting, draining or closed.
        """
        return self.submit_all([payload], deadline_s)[0]

    def submit_all(self, payloads: Sequence[Payload], deadline_s: float | None = None) -> list[Future[Result]]:
        """Accepts all of these requests or none; see `submit`."""
        try:
            requests = [self._request(payload, math.inf if deadline_s is None else deadline_s) for payload in payloads]
            self._queue.put(requests, self._request_s)
        except (RequestRejected, QueueFull, NotServing) as error:
            for _ in payloads:
                self._observer.answered(Answered(_outcome_of(error)))
            raise
        for request in requests:
            request.future.add_done_callback(partial(self._forget_if_cancelled, request))
        return [request.future for request in requests]

    def count_rejected(self) -> None:
        """Counts a rejected request that never came here: what stands in front of the server, HTTP say, rejected it."""
        self._observer.answered(Answered(Outcome.REJECTED))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Turns new requests away, answers those that were accepted, and ends the worker.

        Returns:
            Whether all were answered within `timeout_s` seconds. If not, those that still wait get `NotServing`; the
            batch that is running is answered when it ends.
        """
        before = self._queue.advance(State.DRAINING)
        if before is State.NEW:
            self._queue.advance(State.CLOSED)
        if before.is_before_serving:
            return True  # nothing was accepted; a preparation under way is not waited for
        if threading.current_thread() is not self._worker:
            self._worker.join(timeout_s)
        if not self._worker.is_alive():
            return True
        self._abandon(self._queue.take_all())
        return False

    # What the worker does

    def _work(self) -> None:
        try:
            self._prepare()
            self._queue.advance(State.SERVING)
            self._serve()
        except BaseException as error:  # whatever ended the worker: it is logged, and nobody is left waiting
            self._tell_death(error)
            self._queue.advance(State.BROKEN)
        finally:
            self._queue.advance(State.CLOSED)
            self._abandon([*self._batch, *self._queue.take_all()])

    def _serve(self) -> None:
        while (taken := self._queue.take()) is not None:
            for request in _begun(taken.late):
                self._fail(request, DeadlineExceeded(request.deadline_s), Outcome.EXPIRED)
            self._batch = _begun(taken.batch)
            self._run(self._batch)
            self._batch = ()

    def _run(self, batch: Sequence[Request]) -> None:
        if not batch:
            return
        began = self._clock()
        try:
            results = self._results(batch)
        except Exception as error:  # whatever the model raises belongs to the request that caused it, and to no other
            self._tell_run(batch, began, failed=True)
            self._isolate(batch, error)
            return
        self._tell_run(batch, began, failed=False)
        for request, result in zip(batch, results, strict=True):
            self._reply(request, result)

    def _results(self, batch: Sequence[Request]) -> Sequence[Result]:
        results = self._model([request.payload for request in batch])
        if len(results) != len(batch):
            raise ServingError(f"the model gave {len(results)} results for {len(batch)} requests")
        return results

    def _isolate(self, batch: Sequence[Request], error: Exception) -> None:
        """Runs both halves again; a request that fails alone gets the error."""
        if len(batch) == 1:
            self._fail(batch[0], error, Outcome.FAILED)
            return
        logger.warning("a batch of %d failed and is run again in halves: %r", len(batch), error)
        half = len(batch) // 2
        self._run(batch[:half])
        self._run(batch[half:])

    def _reply(self, request: Request, result: Result) -> None:
        if request.is_late(self._clock()):
            self._fail(request, DeadlineExceeded(request.deadline_s), Outcome.EXPIRED)
            return
        self._tell_end(request, Outcome.OK)
        request.future.set_result(result)

    def _fail(self, request: Request, error: Exception, outcome: Outcome) -> None:
        self._tell_end(request, outcome)
        request.future.set_exception(error)

    # What both do

    def _request(self, payload: Payload, deadline_s: float) -> Request:
        if not deadline_s > 0:
            raise RequestRejected(f"deadline_s={deadline_s!r} is no time at all", hint="give seconds above 0, or None")
        size = self._size_of(payload)
        if size < self.settings.min_size:
            raise RequestRejected(f"size {size} is below {self.settings.min_size}", hint="send a longer request")
        if size > self.settings.max_size:
            raise RequestTooLarge(size, self.settings.max_size)
        now = self._clock()
        # A request with a near deadline spends at most half of its time waiting for company.
        due_at = now + min(self.settings.max_wait_s, deadline_s / 2)
        return Request(payload, size, self.settings.bucket(size), now, deadline_s, due_at)

    def _forget_if_cancelled(self, request: Request, future: Future[Result]) -> None:
        if future.cancelled():
            self._queue.discard(request)
            self._tell_end(request, Outcome.CANCELLED)

    def _abandon(self, requests: Sequence[Request]) -> None:
        open_requests = [request for request in requests if not request.future.done()]
        for request in open_requests:
            if request.future.running() or request.future.set_running_or_notify_cancel():
                self._fail(request, NotServing(self.state), Outcome.ABANDONED)

    def _tell_death(self, error: BaseException) -> None:
        if self.state is State.DRAINING and not self._batch:
            logger.info("the preparation ended with the process: %r", error)
        else:
            logger.error("the serving worker died", exc_info=error)

    def _tell_end(self, request: Request, outcome: Outcome) -> None:
        self._observer.answered(Answered(outcome, self._clock() - request.accepted_at))

    def _tell_run(self, batch: Sequence[Request], began: float, *, failed: bool) -> None:
        run_s = self._clock() - began
        bucket = batch[0].bucket
        if not failed:
            self._request_s += _NEWEST * (run_s / len(batch) - self._request_s)
        self._observer.ran(
            Ran(
                sizes=tuple(request.size for request in batch),
                padded_rows=self.settings.padded_rows(len(batch), bucket),
                padded_size=bucket,
                waits_s=tuple(began - request.accepted_at for request in batch),
                run_s=run_s,
                failed=failed,
            )
        )


def _outcome_of(error: ServingError) -> Outcome:
    """How a request ended that was not accepted."""
    if isinstance(error, QueueFull):
        return Outcome.QUEUE_FULL
    return Outcome.REJECTED if isinstance(error, RequestRejected) else Outcome.NOT_SERVING


def _begun(requests: Sequence[Request]) -> list[Request]:
    """The requests that were not cancelled; from now on they can no longer be."""
    return [request for request in requests if request.future.set_running_or_notify_cancel()]
