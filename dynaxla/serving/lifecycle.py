"""What a server is doing, where threads meet."""

from __future__ import annotations

import threading
from enum import StrEnum

from dynaxla.errors import NotServing

LOOK_S = 1.0
"""How often an idle worker looks whether the process is ending."""


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


class Lifecycle:
    """A state that only goes on, and the condition that its changes, and those of what a subclass guards, are told by."""

    def __init__(self) -> None:
        self._state = State.NEW
        self._changed = threading.Condition()

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

    def _require_serving(self) -> None:
        """Raises:
        NotServing: it does something else.
        """
        if self._state is not State.SERVING:
            raise NotServing(self._state)

    def _drain_at_the_end(self) -> None:
        """When the main thread has ended, the process is about to, and the server drains by itself."""
        if not threading.main_thread().is_alive():
            self.advance(State.DRAINING)
