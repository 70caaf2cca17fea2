"""Where threads meet: the bounded queue of requests, and the state of the engine."""

from __future__ import annotations

from collections import deque

from dynaxla.errors import QueueFull
from dynaxla.serving.lifecycle import LOOK_S, Lifecycle, State
from dynaxla.serving.llm.sequence import Running


class WaitingRoom(Lifecycle):
    """Safe from several threads; first come, first served.

    Args:
        most: how many may wait.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._waiting: deque[Running] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def start_over(self) -> None:
        super().start_over()
        self._waiting = deque()

    def put(self, running: Running, request_s: float) -> None:
        """Takes a request in.

        Raises:
            NotServing: the engine is not serving.
            QueueFull: as many wait as may.
        """
        with self._changed:
            self._require_serving()
            if len(self._waiting) >= self._most:
                raise QueueFull(len(self._waiting), len(self._waiting) * request_s)
            self._waiting.append(running)
            self._changed.notify_all()

    def take(self) -> Running | None:
        """The oldest; None if none waits."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def take_dead(self, now: float) -> list[Running]:
        """Those that were cancelled, or whose deadline has passed."""
        with self._changed:
            dead = [running for running in self._waiting if running.cancelled or running.is_late(now)]
            for running in dead:
                self._waiting.remove(running)
            return dead

    def take_all(self) -> list[Running]:
        with self._changed:
            every = list(self._waiting)
            self._waiting.clear()
            return every

    def wake(self) -> None:
        """Has the worker look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> bool:
        """Waits until something waits; False once the engine is draining and nothing does."""
        with self._changed:
            while not self._waiting and self._state is State.SERVING:
                self._drain_at_the_end()
                self._changed.wait(LOOK_S)
            return bool(self._waiting)
