"""What a forked child of the process makes anew.

Such a child has one thread, the one that forked, and a copy of everything else: locks that other threads hold, clients
without their threads. What has such things is followed, and told in the child. What must not be copied half-made is held
across the fork: a fork waits for the threads that are at work on it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

logger = logging.getLogger("dynaxla")

LONGEST_WAIT_S = 30.0
"""How long a fork waits in all; then it goes on, and the child's locks are open all the same."""


CAPTURING, TRACING, LOADING = range(3)


class Followed(Protocol):
    def after_fork(self) -> None:
        """Called in every forked child before it goes on; cheap, since most children never compute."""
        ...


def new_lock() -> threading.Lock:
    """A lock that is open in a forked child, whoever holds it in the parent."""
    lock = threading.Lock()
    _forks().locks.add(lock)
    return lock


def follow(thing: Followed) -> None:
    """Has `thing.after_fork()` called in every forked child, as long as the thing lives."""
    _forks().followed.add(thing)


def hold(lock: Any, depth: int) -> None:
    """Has a reentrant lock held across forks, for as long as the process lives.

    Args:
        depth: CAPTURING, TRACING or LOADING. Locks are taken in this order: who holds one may wait for a deeper one.
    """
    _forks().held.append((depth, lock))


def keep_for_ever(thing: object) -> None:
    """Keeps an object beyond the end of the interpreter: the end of the thing would wait for threads that are not here."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Forks:
    def __init__(self) -> None:
        self.locks: WeakSet[Any] = WeakSet()
        self.followed: WeakSet[Followed] = WeakSet()
        self.held: list[tuple[int, Any]] = []
        self._taken = threading.local()
        os.register_at_fork(before=self._wait, after_in_parent=self._go_on, after_in_child=self._start_over)

    def _wait(self) -> None:
        until = time.monotonic() + LONGEST_WAIT_S
        taken = []
        for _, lock in sorted(self.held, key=lambda entry: entry[0]):
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                taken.append(lock)
            else:
                logger.warning("a fork waited %g s for a thread that compiles, and goes on without", LONGEST_WAIT_S)
        self._taken.locks = taken

    def _go_on(self) -> None:
        for lock in self._taken.locks:
            lock.release()

    def _start_over(self) -> None:
        missed = [lock for _, lock in self.held if not any(lock is taken for taken in self._taken.locks)]
        for lock in (*self.locks, *missed):
            lock._at_fork_reinit()  # as Python's own modules do
        self._go_on()
        for thing in list(self.followed):
            thing.after_fork()


@cache
def _forks() -> _Forks:
    """The process's own."""
    return _Forks()
