"""A table of what was used of late: as many entries as are worth their memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from dynaxla.isolation.forking import new_lock

Kept = TypeVar("Kept")


class LruCache(Generic[Kept]):
    """At most so many entries; those that were not asked for since half as many others came are forgotten.

    Two tables, of which the older is dropped when the younger is full: a question costs what one of a dict costs.
    Safe from several threads.

    Args:
        most: entries, at least 2.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._young: dict[Hashable, Kept] = {}
        self._old: dict[Hashable, Kept] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, key: Hashable) -> Kept | None:
        """The entry of a key, or None."""
        found = self._young.get(key)
        if found is not None:
            return found
        found = self._old.get(key)
        return found if found is None else self.keep(key, found)

    def keep(self, key: Hashable, value: Kept) -> Kept:
        """Keeps a value for a key, unless there is one by now; gives that which is kept."""
        with self._lock:
            kept = self._young.setdefault(key, self._old.get(key, value))
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
        return kept

    def replace(self, key: Hashable, value: Kept) -> Kept:
        """Keeps a value for a key, in the place of any other; gives it."""
        with self._lock:
            self._old.pop(key, None)
            self._young.pop(key, None)
        return self.keep(key, value)
