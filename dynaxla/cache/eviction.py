"""The bound on a directory's bytes: what was used least recently goes first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dynaxla.cache.directory import Directory

_KEPT_SHARE = 0.9
"""What is left of the bound, so that not every entry behind it costs a count."""


def make_room(directory: Directory, max_bytes: int, *, keep: Path) -> int:
    """Counts a directory and removes entries until it is below its bound; gives how many.

    Where another process is at it already, nothing is done.

    Args:
        keep: the entry that has just been written.
    """
    with _alone(directory) as alone:
        if not alone:
            return 0
        before = directory.journal.total()
        directory.remove_abandoned()
        entries = sorted(directory.found(), key=lambda found: found.used_ns)
        total = sum(found.size for found in entries)
        removed = 0
        if total > max_bytes:
            for found in entries:
                if total <= _KEPT_SHARE * max_bytes:
                    break
                if found.path != keep and directory.remove(found.path):
                    total -= found.size
                    removed += 1
        with suppress(OSError):  # without a journal the next writer counts again
            directory.journal.settle(before, total)
        return removed


@contextmanager
def _alone(directory: Directory) -> Iterator[bool]:
    """Holds the directory's lock, if it is free; where files cannot be locked, two processes may remove more than is needed."""
    lock = FileLock(directory.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
