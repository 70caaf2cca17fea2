"""Which requests run together next: groups by bucket, and the queue that the worker takes batches from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dynaxla.serving.lifecycle import PROCESS_POLL_S, State
from dynaxla.serving.request_queue import Request, RequestQueue
from dynaxla.serving.settings import Settings


@dataclass(slots=True, eq=False)
class BatchRequest(Request):
    """A request that is run in a batch.

    Attributes:
        payload: the model's input.
        size: its size, in elements.
        bucket: the size it is padded to.
        due_at: when it runs even in a batch that is not full, in seconds of the server's clock.
        future: of its result.
    """

    payload: Any
    size: int
    bucket: int
    due_at: float = 0.0
    future: Future[Any] = field(default_factory=Future)


Group = dict[BatchRequest, None]
"""Requests of one bucket, oldest first: a dict, since any of them may be removed."""


class BucketGroups:
    """The requests that wait, grouped by bucket. Knows no threads and no clock: the time is an argument.

    A group is due when it is full, or when one of its requests is due.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._groups: dict[int, Group] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for group in self._groups.values() for request in group)

    def add(self, request: BatchRequest) -> None:
        self._groups.setdefault(request.bucket, {})[request] = None
        self._count += 1

    def remove(self, request: BatchRequest) -> bool:
        """Removes a request. Returns whether it was waiting."""
        group = self._groups.get(request.bucket, {})
        if request not in group:
            return False
        del group[request]
        self._count -= 1
        if not group:
            del self._groups[request.bucket]
        return True

    def take_batch(self, now: float, *, all_due: bool = False) -> list[BatchRequest]:
        """Removes the oldest requests of the due group whose first has waited longest. [] if no group is due.

        Args:
            now: the time, in seconds of the clock of `due_at`.
            all_due: every group is due, since no more requests will come.
        """
        due = [group for bucket, group in self._groups.items() if all_due or self._group_due_at(bucket, group) <= now]
        if not due:
            return []
        group = min(due, key=lambda group: next(iter(group)).accepted_at)
        batch = list(group)[: self._settings.rows_to_run(len(group), next(iter(group)).bucket)]
        for request in batch:
            self.remove(request)
        return batch

    def due_at(self) -> float:
        """When the next group is due; infinity if nothing waits, minus infinity if a group is full."""
        return min((self._group_due_at(bucket, group) for bucket, group in self._groups.items()), default=math.inf)

    def _group_due_at(self, bucket: int, group: Group) -> float:
        if len(group) >= self._settings.max_rows(bucket):
            return -math.inf
        return min(request.due_at for request in group)


@dataclass(frozen=True, slots=True)
class Taken:
    """The requests that leave the queue at one time.

    Attributes:
        batch: to be run: requests of one bucket, oldest first; may be empty.
        late: not to be run: their deadline has passed.
    """

    batch: Sequence[BatchRequest]
    late: Sequence[BatchRequest]


class BatchQueue(RequestQueue[BatchRequest]):
    """The queue of a batching server.

    Args:
        settings: how many requests may wait, and how they are batched.
        clock: seconds, never going back.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._groups = BucketGroups(settings)
        self._clock = clock
        super().__init__(self._groups, settings.max_queue, settings.max_wait_s)

    def take(self) -> Taken | None:
        """Waits for a batch that is due. None once the server is draining and nothing waits any more."""
        with self._changed:
            while True:
                self._drain_if_process_ends()
                now = self._clock()
                draining = self._state is not State.SERVING
                taken = Taken(late=self.take_obsolete(now), batch=self._groups.take_batch(now, all_due=draining))
                if taken.batch or taken.late:
                    return taken
                if draining:
                    return None
                self._wait_until(self._groups.due_at(), now)

    def _wait_until(self, time_s: float, now: float) -> None:
        self._changed.wait(min(time_s - now, PROCESS_POLL_S))
