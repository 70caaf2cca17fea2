"""Keeps the process usable in forked children.

A forked child has one thread, the one that forked, and a copy of everything else: locks that other threads hold, clients
without their threads. Objects with such state register to be notified in the child. Locks that guard state which must not be
copied half-changed are acquired before a fork: it waits for the threads that hold them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

logger = logging.getLogger("dynaxla")

LONGEST_WAIT_S = 30.0
"""Longest total time that a fork waits for locks. It then goes on; the child's locks are released in any case."""


CAPTURING, TRACING, LOADING = range(3)


Followed = TypeVar("Followed")


class ForkListener(Protocol):
    def after_fork(self) -> None:
        """Called in every forked child right after the fork. Must be cheap: most children never compute."""
        ...


def new_lock() -> threading.Lock:
    """A lock that is released in a forked child, even if another thread of the parent holds it."""
    lock = threading.Lock()
    _forks().locks.add(lock)
    return lock


def new_reentrant_lock() -> threading.RLock:
    """Likewise one that the thread which holds it may acquire again."""
    lock = threading.RLock()
    _forks().locks.add(lock)
    return lock


def notify_after_fork(thing: ForkListener) -> None:
    """Has `thing.after_fork()` called in every forked child as long as `thing` is alive (it is held weakly)."""
    _forks().followed.add(thing)


def list_followed(kind: type[Followed]) -> list[Followed]:
    """The things of a class that are alive and that `notify_after_fork` was given."""
    return [thing for thing in list(_forks().followed) if isinstance(thing, kind)]


def hold_across_forks(lock: Any, depth: int) -> None:
    """Has a reentrant lock acquired across forks from now on.

    Args:
        depth: CAPTURING, TRACING or LOADING. Locks are acquired in this order: a thread that holds one may wait for
        a deeper one.
    """
    _forks().held.append((depth, lock))


def keep_alive(thing: object) -> None:
    """Keeps an object alive until the process ends without destroying it: its destructor would wait for threads of
    the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Forks:
    def __init__(self) -> None:
        self.locks: WeakSet[Any] = WeakSet()
        self.followed: WeakSet[ForkListener] = WeakSet()
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
    """The locks and listeners of the process."""
    return _Forks()
