"""The programs of one part: found by their keys, and bounded."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView

from dynaxla.bucketing.recompile_warning import Crowd
from dynaxla.bucketing.shape_keys import Key, Keys
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program import Program

logger = logging.getLogger("dynaxla")


class ProgramCache:
    """Programs by key, those that were used last behind the others. Safe from several threads.

    Args:
        crowd: notices where they are many.
        most: above it those that were used least recently are dropped.
    """

    def __init__(self, crowd: Crowd, recorder: Recorder, most: int) -> None:
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._crowd = crowd
        self._recorder = recorder
        self._most = most
        self._turns: dict[Key, threading.Lock] = {}
        self._lock = new_lock()
        self.get = self._programs.get
        self.keys: Callable[[], KeysView[Key]] = self._programs.keys

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._programs)

    def __contains__(self, key: object) -> bool:
        return key in self._programs

    def mark_used(self, key: Key) -> None:
        # Another thread may just have dropped it; its call has the program all the same.
        with contextlib.suppress(KeyError):
            self._programs.move_to_end(key)

    @contextlib.contextmanager
    def turn(self, key: Key) -> Iterator[None]:
        """One thread at a time makes the program of a key; others make other ones meanwhile."""
        with self._lock:
            turn = self._turns.setdefault(key, new_lock())
        with turn:
            yield
        with self._lock:
            self._turns.pop(key, None)

    def keep(self, key: Key, program: Program, keys: Keys) -> list[Key]:
        """Adds a program; gives the keys of those that had to leave for it."""
        with self._lock:
            self._programs[key] = program
            for notice in self._crowd.notices(list(self._programs), keys.describe):
                self._recorder.note_many_programs(str(notice))
                logger.warning("%s", notice)
            dropped = []
            while len(self._programs) > self._most:
                dropped.append(self._programs.popitem(last=False)[0])
            self._recorder.add(evictions=len(dropped))
            for superseded in keys.superseded():
                self._programs.pop(superseded, None)
            keys.renew()
        return dropped
