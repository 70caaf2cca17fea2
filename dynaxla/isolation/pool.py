"""A pool of child processes of one kind, for concurrent requests."""

from __future__ import annotations

from typing import Any

from dynaxla.isolation.children import ChildProcess
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.options import Limits


class ChildPool:
    """Child processes that answer requests concurrently. A further child is started when all others are busy.

    Args:
        module: see `ChildProcess`.
        most: maximum number of children; further requests wait for the child with the fewest requests.
        inject_faults: lets tests make the children fail.
    """

    def __init__(self, module: str, most: int, *, inject_faults: bool = False) -> None:
        self.children = tuple(ChildProcess(module, inject_faults=inject_faults) for _ in range(most))
        self._asked = dict.fromkeys(self.children, 0)
        self._lock = new_lock()
        notify_after_fork(self)

    def start(self) -> None:
        """Starts the first child, if it does not run, without waiting for it."""
        if self.children[0].pid is None:
            self.children[0].start()

    def ask(self, request: object, limits: Limits) -> Any:
        """A child's answer to a request; both are pickled.

        Raises:
            ChildDied, ChildTookTooLong, ChildOutOfMemory: there is no answer, and that child's next request gets a new one.
            ChildUnavailable: a child cannot be started, or two were ended from outside.
        """
        with self._lock:
            child = min(self.children, key=self._asked.__getitem__)
            self._asked[child] += 1
        try:
            return child.ask(request, limits)
        finally:
            with self._lock:
                self._asked[child] -= 1

    def close(self) -> None:
        """Ends the children."""
        for child in self.children:
            child.close()

    def after_fork(self) -> None:
        self._asked = dict.fromkeys(self.children, 0)  # the threads that asked are the parent's
