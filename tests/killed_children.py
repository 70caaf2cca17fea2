"""Ends the children of a process from outside, as a system that is short of memory does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def killing(find_pid: Callable[[], int | None]) -> Iterator[None]:
    """Kills the child that there is, and each one that comes in its place."""
    over = threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while not over.wait(0.3):
            pid = find_pid()
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()
