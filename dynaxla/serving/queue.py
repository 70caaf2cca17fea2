"""Where threads meet: the bounded queue that submitters fill and the worker empties, and the state of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynaxla.errors import QueueFull, RequestRejected
from dynaxla.serving.batcher import Request, Waiting
from dynaxla.serving.lifecycle import LOOK_S, Lifecycle, State
from dynaxla.serving.settings import Settings


@dataclass(frozen=True, slots=True)
class Taken:
    """What leaves the queue at one time.

    Attributes:
        batch: to be run: requests of one bucket, oldest first; may be empty.
        late: not to be run: their deadline has passed.
    """

    batch: Sequence[Request]
    late: Sequence[Request]


class Queue(Lifecycle):
    """Safe from several threads.

    Args:
        settings: how many may wait, and how they are batched.
        clock: seconds, never going back.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._waiting = Waiting(settings)

    def __len__(self) -> int:
        return len(self._waiting)

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
            self._require_serving()
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
        """Waits for a batch that is due; None once the server is draining and nothing waits any more."""
        with self._changed:
            while True:
                self._drain_at_the_end()
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
        self._changed.wait(min(time_s - now, LOOK_S))
