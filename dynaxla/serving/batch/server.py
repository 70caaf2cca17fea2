"""The batching server: takes the next batch, runs it and replies. One worker thread runs the model; any thread may submit."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from dynaxla.errors import DeadlineExceeded, NotServing, RequestRejected, RequestTooLarge, ServingError
from dynaxla.serving.batch.batcher import BatchQueue, BatchRequest
from dynaxla.serving.events import BatchFinished, Observer, Outcome, RequestFinished
from dynaxla.serving.lifecycle import State
from dynaxla.serving.settings import Settings
from dynaxla.serving.worker_server import WorkerServer, require_deadline

logger = logging.getLogger("dynaxla")

Payload = TypeVar("Payload")
Result = TypeVar("Result")


class Server(WorkerServer[BatchRequest, BatchQueue], Generic[Payload, Result]):
    """Answers requests in batches of one bucket.

    `drain` that runs out of time abandons the requests that wait; the batch that is running is answered when it ends.

    Args:
        run: returns one result per payload, in order; the payloads are of one bucket, at most `settings.max_rows(bucket)`.
            If it raises, both halves of the batch are run again, down to single requests: only a request that fails alone
            gets the error.
        size_of: a payload's size, in elements of the dim that varies. May raise `RequestRejected`.
        settings: how requests are batched and bounded.
        prepare: run by the worker before anything is accepted: the warm-up.
        observer: told of every run and every request's end.
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
        self._observer = observer or Observer()
        super().__init__(BatchQueue(settings, clock), self._observer, clock, "dynaxla-serving")
        self.settings = settings
        self._model = run
        self._size_of = size_of
        self._prepare_model = prepare
        self._batch: Sequence[BatchRequest] = ()

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
        with self._count_refusals(len(payloads)):
            requests = [self._request(payload, math.inf if deadline_s is None else deadline_s) for payload in payloads]
            self._queue.put(requests, self._request_s)
        for request in requests:
            request.future.add_done_callback(partial(self._remove_if_cancelled, request))
        return [request.future for request in requests]

    async def answer_all(self, payloads: Sequence[Payload], deadline_s: float | None = None) -> list[Result]:
        """Submits requests, all or none, and awaits their results, in order.

        If one fails, or the task that awaits is cancelled, the others are cancelled. The deadline holds to the moment, also
        while a batch runs.

        Raises:
            DeadlineExceeded: the results took longer than `deadline_s` seconds.
            ServingError: what `submit` raises.
            Exception: what the model raised for one of these requests alone.
        """
        futures = self.submit_all(payloads, deadline_s)
        try:
            async with asyncio.timeout(deadline_s) as timeout:
                return await asyncio.gather(*map(asyncio.wrap_future, futures))
        except TimeoutError:
            if timeout.expired() and deadline_s is not None:
                raise DeadlineExceeded(deadline_s) from None
            raise
        finally:
            for future in futures:
                future.cancel()

    def count_rejected(self) -> None:
        """Counts a rejected request that never came here: what stands in front of the server, HTTP say, rejected it."""
        self._observer.request_finished(RequestFinished(Outcome.REJECTED))

    def _prepare(self) -> None:
        self._prepare_model()

    def _serve(self) -> None:
        while (taken := self._queue.take()) is not None:
            for request in _start_all(taken.late):
                self._fail(request, DeadlineExceeded(request.deadline_s), Outcome.EXPIRED)
            self._batch = _start_all(taken.batch)
            self._run(self._batch)
            self._batch = ()

    def _run(self, batch: Sequence[BatchRequest]) -> None:
        if not batch:
            return
        started_at = self._clock()
        try:
            results = self._results(batch)
        except Exception as error:  # whatever the model raises belongs to the request that caused it, and to no other
            self._report_run(batch, started_at, failed=True)
            self._isolate(batch, error)
            return
        self._report_run(batch, started_at, failed=False)
        for request, result in zip(batch, results, strict=True):
            self._reply(request, result)

    def _results(self, batch: Sequence[BatchRequest]) -> Sequence[Result]:
        results = self._model([request.payload for request in batch])
        if len(results) != len(batch):
            raise ServingError(f"the model gave {len(results)} results for {len(batch)} requests")
        return results

    def _isolate(self, batch: Sequence[BatchRequest], error: Exception) -> None:
        """Runs both halves again; a request that fails alone gets the error."""
        if len(batch) == 1:
            self._fail(batch[0], error, Outcome.FAILED)
            return
        logger.warning("a batch of %d failed and is run again in halves: %r", len(batch), error)
        half = len(batch) // 2
        self._run(batch[:half])
        self._run(batch[half:])

    def _reply(self, request: BatchRequest, result: Result) -> None:
        if request.is_late(self._clock()):
            self._fail(request, DeadlineExceeded(request.deadline_s), Outcome.EXPIRED)
            return
        self._report_end(request, Outcome.OK)
        request.future.set_result(result)

    def _fail(self, request: BatchRequest, error: Exception, outcome: Outcome) -> None:
        self._report_end(request, outcome)
        request.future.set_exception(error)

    # What both do

    def _request(self, payload: Payload, deadline_s: float) -> BatchRequest:
        require_deadline(deadline_s)
        size = self._size_of(payload)
        if size < self.settings.min_size:
            raise RequestRejected(f"size {size} is below {self.settings.min_size}", hint="send a longer request")
        if size > self.settings.max_size:
            raise RequestTooLarge(size, self.settings.max_size)
        now = self._clock()
        # A request with a near deadline spends at most half of its time waiting for company.
        due_at = now + min(self.settings.max_wait_s, deadline_s / 2)
        return BatchRequest(payload, size, self.settings.bucket(size), due_at, accepted_at=now, deadline_s=deadline_s)

    def _remove_if_cancelled(self, request: BatchRequest, future: Future[Result]) -> None:
        if future.cancelled():
            self._queue.remove(request)
            self._report_end(request, Outcome.CANCELLED)

    def _give_up(self) -> None:
        self._abandon(self._queue.take_all())

    def _abandon_all(self) -> None:
        self._abandon([*self._batch, *self._queue.take_all()])

    def _abandon(self, requests: Sequence[BatchRequest]) -> None:
        open_requests = [request for request in requests if not request.future.done()]
        for request in open_requests:
            if request.future.running() or request.future.set_running_or_notify_cancel():
                self._fail(request, NotServing(self.state), Outcome.ABANDONED)

    def _log_death(self, error: BaseException) -> None:
        if self.state is State.DRAINING and not self._batch:
            logger.info("the preparation ended with the process: %r", error)
        else:
            super()._log_death(error)

    def _report_end(self, request: BatchRequest, outcome: Outcome) -> None:
        self._observer.request_finished(RequestFinished(outcome, self._clock() - request.accepted_at))

    def _report_run(self, batch: Sequence[BatchRequest], started_at: float, *, failed: bool) -> None:
        run_s = self._clock() - started_at
        bucket = batch[0].bucket
        if not failed:
            self._update_average(run_s / len(batch))
        self._observer.batch_finished(
            BatchFinished(
                sizes=tuple(request.size for request in batch),
                padded_rows=self.settings.padded_rows(len(batch), bucket),
                padded_size=bucket,
                waits_s=tuple(started_at - request.accepted_at for request in batch),
                run_s=run_s,
                failed=failed,
            )
        )


def _start_all(requests: Sequence[BatchRequest]) -> list[BatchRequest]:
    """The requests that were not cancelled; from now on they can no longer be."""
    return [request for request in requests if request.future.set_running_or_notify_cancel()]
