"""Programs by key, and bounded: of a compiled part, of the device's ops, of users' gradients, of a language engine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView
from typing import Generic, TypeVar

from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.diagnostics import ManyPrograms
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.recorder import Recorder

logger = logging.getLogger("dynaxla")

KeyT = TypeVar("KeyT", bound=Hashable)
ProgramT = TypeVar("ProgramT")


class ProgramListener:
    """Is told what happens to a part's programs. This one ignores it all; subclasses override what they want to know."""

    def on_put(self, values: tuple[int, ...]) -> None:
        """A program was added for calls of these sizes."""

    def on_evict(self, key: ShapeKey) -> None:
        """A program was dropped to make room."""

    def on_waited(self) -> None:
        """A call that waited for its program to be compiled has its results."""


class ProgramCache(Generic[KeyT, ProgramT]):
    """Programs by key, the least recently used first. Safe from several threads.

    Args:
        capacity: above it the least recently used programs are dropped.
        recorder: keeps warnings for the report; None: nothing is warned of.

    Attributes:
        get: the program of a key, or None.
        keys: a view of the keys.
    """

    def __init__(self, capacity: int, recorder: Recorder | None = None) -> None:
        self._programs: OrderedDict[KeyT, ProgramT] = OrderedDict()
        self._capacity = capacity
        self._half = capacity // 2
        self._recorder = recorder
        self._key_locks: dict[KeyT, threading.Lock] = {}
        self._lock = new_lock()
        self.get: Callable[[KeyT], ProgramT | None] = self._programs.get
        self.keys: Callable[[], KeysView[KeyT]] = self._programs.keys

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, key: object) -> bool:
        return key in self._programs

    def mark_used(self, key: KeyT) -> None:
        """Keeps a program while others go.

        The order is kept from when the cache is half full: half its capacity of new programs is still to come before one is
        dropped. Until then a call pays 0.1 us here (`get`: 0.3 us), and no second hash of its key.
        """
        if len(self._programs) > self._half:
            # Another thread may just have dropped it; its call has the program all the same.
            with contextlib.suppress(KeyError):
                self._programs.move_to_end(key)

    @contextlib.contextmanager
    def lock(self, key: KeyT) -> Iterator[None]:
        """Held by the one thread that compiles or loads the program of a key; other keys have locks of their own."""
        with self._lock:
            key_lock = self._key_locks.setdefault(key, new_lock())
        with key_lock:
            yield
        with self._lock:
            self._key_locks.pop(key, None)

    def get_or_make(self, key: KeyT, make: Callable[[], ProgramT]) -> ProgramT:
        """The program of a key; made by one thread, for which others that need it wait."""
        found = self.get(key)
        if found is None:
            with self.lock(key):
                found = self.get(key)
                if found is None:
                    found = make()
                    self.put(key, found)
        else:
            self.mark_used(key)
        return found

    def put(self, key: KeyT, program: ProgramT, notices: Iterable[ManyPrograms] = ()) -> list[KeyT]:
        """Adds a program. Returns the keys of the programs evicted to make room.

        Args:
            notices: warnings about the number of programs; iterated with the new one there, before any is dropped.
        """
        with self._lock:
            self._programs[key] = program
            due = list(notices)
            evicted = [self._programs.popitem(last=False)[0] for _ in range(len(self._programs) - self._capacity)]
        for notice in due:
            if self._recorder is not None:
                self._recorder.note(many_programs=str(notice))
                logger.warning("%s", notice)
        return evicted

    def drop(self, keys: Iterable[KeyT]) -> None:
        """Removes programs that no call uses any more."""
        with self._lock:
            for key in keys:
                self._programs.pop(key, None)
