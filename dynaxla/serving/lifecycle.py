"""The state of a server, shared by its threads."""

from __future__ import annotations

import threading
from enum import StrEnum

from dynaxla.errors import NotServing

PROCESS_POLL_S = 1.0
"""Seconds between an idle worker's checks whether the process is ending."""


class State(StrEnum):
    """What a server is doing. A server passes through these from top to bottom, and never back."""

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
    """A state that only advances. `_changed` guards it and the fields of subclasses, and is notified of their changes."""

    def __init__(self) -> None:
        self._state = State.NEW
        self._changed = threading.Condition()

    @property
    def state(self) -> State:
        return self._state

    def advance(self, state: State) -> State:
        """Advances to `state`, unless a later one is reached already. Returns the state before."""
        with self._changed:
            before = self._state
            self._state = max(before, state, key=_ORDER.index)
            self._changed.notify_all()
            return before

    def reset_after_fork(self) -> None:
        """Breaks a server that was started before the fork: its worker does not exist in the child."""
        self._changed = threading.Condition()
        if self._state is not State.NEW:
            self._state = State.BROKEN

    def wait_until_ready(self, timeout_s: float | None) -> State:
        """Waits at most `timeout_s` seconds until the start has ended. Returns the state then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._state.is_before_serving, timeout_s)
            return self._state

    def _require_serving(self) -> None:
        """Raises:
        NotServing: the state is another.
        """
        if self._state is not State.SERVING:
            raise NotServing(self._state)

    def _drain_if_process_ends(self) -> None:
        """Drains once the main thread has ended, since the process is about to."""
        if not threading.main_thread().is_alive():
            self.advance(State.DRAINING)
