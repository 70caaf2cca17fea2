"""The programs of one part: found by their keys, and bounded."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView

from dynaxla.bucketing.recompile_warning import RecompileWarnings
from dynaxla.bucketing.shape_keys import ShapeKey, ShapeKeys
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program import Program

logger = logging.getLogger("dynaxla")


class ProgramListener:
    """Is told what happens to a part's programs. This one ignores it all; subclasses override what they want to know."""

    def on_put(self, values: tuple[int, ...]) -> None:
        """A program was added for calls of these sizes."""

    def on_evict(self, key: ShapeKey) -> None:
        """A program was dropped to make room."""

    def on_waited(self) -> None:
        """A call that waited for its program to be compiled has its results."""


class ProgramCache:
    """Programs by key, the least recently used first. Safe from several threads.

    Args:
        warnings: warns once the programs are many.
        capacity: above it the least recently used programs are dropped.
    """

    def __init__(self, warnings: RecompileWarnings, recorder: Recorder, capacity: int) -> None:
        self._programs: OrderedDict[ShapeKey, Program] = OrderedDict()
        self._warnings = warnings
        self._recorder = recorder
        self._capacity = capacity
        self._key_locks: dict[ShapeKey, threading.Lock] = {}
        self._lock = new_lock()
        self.get = self._programs.get
        self.keys: Callable[[], KeysView[ShapeKey]] = self._programs.keys

    def has(self, key: object) -> bool:
        return key in self._programs

    def mark_used(self, key: ShapeKey) -> None:
        # Another thread may just have dropped it; its call has the program all the same.
        with contextlib.suppress(KeyError):
            self._programs.move_to_end(key)

    @contextlib.contextmanager
    def lock(self, key: ShapeKey) -> Iterator[None]:
        """Held by the one thread that compiles or loads the program of a key; other keys have locks of their own."""
        with self._lock:
            key_lock = self._key_locks.setdefault(key, new_lock())
        with key_lock:
            yield
        with self._lock:
            self._key_locks.pop(key, None)

    def put(self, key: ShapeKey, program: Program, keys: ShapeKeys) -> list[ShapeKey]:
        """Adds a program. Returns the keys of the programs evicted to make room."""
        with self._lock:
            self._programs[key] = program
            for notice in self._warnings.notices(list(self._programs), keys.describe):
                self._recorder.note_many_programs(str(notice))
                logger.warning("%s", notice)
            evicted = []
            while len(self._programs) > self._capacity:
                evicted.append(self._programs.popitem(last=False)[0])
            self._recorder.add(evictions=len(evicted))
            for superseded_keys in keys.superseded_keys():
                self._programs.pop(superseded_keys, None)
            keys.renew()
        return evicted
