"""Where threads meet: the bounded queue of requests, and the state of the engine."""

from __future__ import annotations

import threading
from collections import deque

from dynaxla.errors import NotServing, QueueFull
from dynaxla.serving.llm.running import Running
from dynaxla.serving.queue import State

_ORDER = list(State)
_LOOK_S = 1.0  # how often an idle worker looks whether the process is ending


class WaitingRoom:
    """Safe from several threads; first come, first served.

    Args:
        most: how many may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Running] = deque()
        self._state = State.NEW

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
        self._waiting = deque()
        if self._state is not State.NEW:
            self._state = State.BROKEN

    def wait_until_ready(self, timeout_s: float | None) -> State:
        with self._changed:
            self._changed.wait_for(lambda: not self._state.is_before_serving, timeout_s)
            return self._state

    def put(self, running: Running, request_s: float) -> None:
        """Takes a request in.

        Raises:
            NotServing: the engine is not serving.
            QueueFull: as many wait as may.
        """
        with self._changed:
            if self._state is not State.SERVING:
                raise NotServing(self._state)
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
        """Waits until something waits; False once the engine is draining and nothing does.

        When the main thread has ended, the process is about to, and the engine drains by itself.
        """
        with self._changed:
            while not self._waiting and self._state is State.SERVING:
                if not threading.main_thread().is_alive():
                    self.advance(State.DRAINING)
                self._changed.wait(_LOOK_S)
            return bool(self._waiting)
