"""What processes tell each other now and then, beside their runs: that they are alive, and what they have run in which order.

Two programs of the same sizes may exchange numbers though they are not the same: nothing hangs then, and the numbers are wrong.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from dynaxla.errors import ProcessLost
from dynaxla.runtime.process_set import LOST_AFTER_S, ProcessSet

EVERY = 16
"""So many runs apart the order is remembered, for processes that are ahead or behind."""

_KEPT = 64


LEFT = b"left"
"""What a process says that ends."""


class Heartbeats:
    """Tells the others that this process is alive, and hears the next one: each process is heard by one."""

    def __init__(self, processes: ProcessSet) -> None:
        self._processes = processes
        self._store = processes.store
        self._beat = 0
        self._heard: tuple[int, bytes, float] = (-1, b"", 0.0)

    def beat(self) -> None:
        """Has the processes fail where one of them was not heard for long."""
        me, size = self._processes.rank, self._processes.size
        self._beat += 1
        self._store.set(f"alive/{me}", str(self._beat))
        other, now = (me + 1) % size, time.monotonic()
        key = f"alive/{other}"
        text = self._store.get(key) if self._store.check([key]) else b"0"
        if other == me or text == LEFT or self._heard[:2] != (other, text):
            self._heard = (other, text, now)
        elif now - self._heard[2] > LOST_AFTER_S:
            lost = ProcessLost((other,), f"nothing was heard of it for {LOST_AFTER_S:g} s")
            self._store.set("failure", lost.explanation)
            self._processes.fail(lost)


@dataclass(slots=True)
class RunOrder:
    """What one set of processes does together, as this one does it: programs that run, or values that are put on a mesh.

    Attributes:
        count: how many.
        checksum: of all of them, in order.
    """

    count: int = 0
    checksum: int = 0
    _marks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _told: int = 0

    def add(self, digest: str) -> None:
        """Adds a program or a value."""
        self.count += 1
        self.checksum = zlib.crc32(digest.encode(), self.checksum)
        if self.count % EVERY == 0:
            self._marks.append((self.count, self.checksum))

    def take_news(self) -> str | None:
        """What to tell the others; None if they know it."""
        if self._told == self.count:
            return None
        self._told = self.count
        return json.dumps([*self._marks, (self.count, self.checksum)])

    def differs(self, told: bytes) -> int | None:
        """By which of its runs another process had run other programs; None if nothing says so."""
        own = {**dict(self._marks), self.count: self.checksum}
        return next((count for count, checksum in json.loads(told) if own.get(count, checksum) != checksum), None)
