"""Where threads meet: the bounded queue that submitters fill and the worker empties, and the state of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dynaxla.errors import NotServing, QueueFull, RequestRejected
from dynaxla.serving.batching import Request, Waiting
from dynaxla.serving.settings import Settings


class State(StrEnum):
    """What a server is doing. It goes down this list and never up."""

    NEW = "not started"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    CLOSED = "closed"
    BROKEN = "broken"

    @property
    def is_before_serving(self) -> bool:
        return self in (State.NEW, State.STARTING)


_ORDER = list(State)
_LOOK_S = 1.0  # how often an idle worker looks whether the process is ending


@dataclass(frozen=True, slots=True)
class Taken:
    """What leaves the queue at one time.

    Attributes:
        batch: to be run: requests of one bucket, oldest first; may be empty.
        late: not to be run: their deadline has passed.
    """

    batch: Sequence[Request]
    late: Sequence[Request]


class Queue:
    """Safe from several threads.

    Args:
        settings: how many may wait, and how they are batched.
        clock: seconds, never going back.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._waiting = Waiting(settings)
        self._state = State.NEW
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> State:
        return self._state

    def advance(self, state: State) -> State:
        """Moves on to this state, unless a later one is reached already; gives the state before."""
        with self._changed:
            before = self._state
            self._state = max(before, state, key=_ORDER.index)
            self._changed.notify_all()
            return before

    def start_over(self) -> None:
        """In a forked child, which has no worker: whatever was begun is broken."""
        self._changed = threading.Condition()
        if self._state is not State.NEW:
            self._state = State.BROKEN

    def wait_until_ready(self, timeout_s: float | None) -> State:
        """Waits until the server is past its start, at most `timeout_s` seconds; gives the state then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._state.is_before_serving, timeout_s)
            return self._state

    def put(self, requests: Sequence[Request], request_s: float) -> None:
        """Takes in all of the requests or none.

        Args:
            requests: to be answered.
            request_s: about how long one takes, in seconds, for the hint when to try again.

        Raises:
            NotServing: the server is not serving.
            QueueFull: there is no room for all.
            RequestRejected: there never will be.
        """
        with self._changed:
            if self._state is not State.SERVING:
                raise NotServing(self._state)
            if len(requests) > self._settings.max_queue:
                raise RequestRejected(
                    f"{len(requests)} requests at once can never fit into a queue of {self._settings.max_queue}",
                    hint="send fewer at once",
                )
            if len(self._waiting) + len(requests) > self._settings.max_queue:
                raise QueueFull(len(self._waiting), max(self._settings.max_wait_s, len(self._waiting) * request_s))
            for request in requests:
                self._waiting.add(request)
            self._changed.notify_all()

    def discard(self, request: Request) -> bool:
        """Takes a request out; whether it was still waiting."""
        with self._changed:
            return self._waiting.remove(request)

    def take(self) -> Taken | None:
        """Waits for a batch that is due; None once the server is draining and nothing waits any more.

        When the main thread has ended, the process is about to, and the server drains by itself.
        """
        with self._changed:
            while True:
                if not threading.main_thread().is_alive():
                    self.advance(State.DRAINING)
                now = self._clock()
                draining = self._state is not State.SERVING
                taken = Taken(late=self._waiting.take_late(now), batch=self._waiting.take_batch(now, hurry=draining))
                if taken.batch or taken.late:
                    return taken
                if draining:
                    return None
                self._wait_until(self._waiting.due_at(), now)

    def take_all(self) -> list[Request]:
        """Takes out whatever waits."""
        with self._changed:
            return self._waiting.take_all()

    def _wait_until(self, time_s: float, now: float) -> None:
        self._changed.wait(min(time_s - now, _LOOK_S))
