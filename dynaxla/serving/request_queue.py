"""The bounded queue of requests between the threads that submit and the worker, with the state of the server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dynaxla.errors import QueueFull, RequestRejected
from dynaxla.serving.lifecycle import PROCESS_POLL_S, Lifecycle, State


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request that was accepted.

    Attributes:
        accepted_at: when it was accepted, in seconds of the server's clock.
        deadline_s: seconds after that when its answer is of no use any more.
    """

    accepted_at: float
    deadline_s: float = math.inf

    def is_late(self, now: float) -> bool:
        return now >= self.accepted_at + self.deadline_s

    def is_obsolete(self, now: float) -> bool:
        """Whether nobody wants the answer any more."""
        return self.is_late(now)


R = TypeVar("R", bound=Request)


class WaitingRequests(Protocol[R]):
    """The requests in a queue, in the order of a server's own."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[R]: ...

    def add(self, request: R) -> None: ...

    def remove(self, request: R) -> bool:
        """Removes a request. Returns whether it was there."""


class RequestQueue(Lifecycle, Generic[R]):
    """A bounded queue, safe from several threads.

    Args:
        waiting: where requests are stored; guarded by this queue.
        max_queue: most requests that wait.
        min_retry_s: the least time, in seconds, after which a client is told to try again.
    """

    def __init__(self, waiting: WaitingRequests[R], max_queue: int, min_retry_s: float = 0.0) -> None:
        super().__init__()
        self._waiting = waiting
        self._max_queue = max_queue
        self._min_retry_s = min_retry_s

    def __len__(self) -> int:
        return len(self._waiting)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self.take_all()

    def put(self, requests: Sequence[R], request_s: float) -> None:
        """Queues all of the requests or none.

        Args:
            requests: to be answered.
            request_s: the average time per request, in seconds, from which a client is told when to try again.

        Raises:
            NotServing: the server is not serving.
            QueueFull: there is no room for all of them now.
            RequestRejected: there never will be.
        """
        with self._changed:
            self._require_serving()
            if len(requests) > self._max_queue:
                raise RequestRejected(
                    f"{len(requests)} requests at once can never fit into a queue of {self._max_queue}",
                    hint="send fewer at once",
                )
            if len(self._waiting) + len(requests) > self._max_queue:
                raise QueueFull(len(self._waiting), max(self._min_retry_s, len(self._waiting) * request_s))
            for request in requests:
                self._waiting.add(request)
            self._changed.notify_all()

    def remove(self, request: R) -> bool:
        """Removes a request. Returns whether it was still waiting."""
        with self._changed:
            return self._waiting.remove(request)

    def take_obsolete(self, now: float) -> list[R]:
        """Removes the requests whose answers nobody wants any more."""
        with self._changed:
            return self._remove_all([request for request in self._waiting if request.is_obsolete(now)])

    def take_all(self) -> list[R]:
        """Removes every request."""
        with self._changed:
            return self._remove_all(list(self._waiting))

    def _remove_all(self, requests: list[R]) -> list[R]:
        for request in requests:
            self._waiting.remove(request)
        return requests


@dataclass(slots=True)
class _OldestFirst(Generic[R]):
    _requests: dict[R, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def add(self, request: R) -> None:
        self._requests[request] = None

    def remove(self, request: R) -> bool:
        return self._requests.pop(request, request) is None


class FifoQueue(RequestQueue[R]):
    """A queue from which the worker takes the oldest request, one at a time."""

    def __init__(self, max_queue: int) -> None:
        super().__init__(_OldestFirst(), max_queue)

    def take(self) -> R | None:
        """Removes the oldest request; None if none waits."""
        with self._changed:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                self._waiting.remove(oldest)
            return oldest

    def wake_worker(self) -> None:
        """Makes `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> bool:
        """Waits until a request waits. Returns False once the server is draining and none does."""
        with self._changed:
            while not len(self._waiting) and self._state is State.SERVING:
                self._drain_if_process_ends()
                self._changed.wait(PROCESS_POLL_S)
            return bool(len(self._waiting))
