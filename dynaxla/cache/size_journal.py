"""How many bytes a folder holds, about, without looking into it; and a clock for its entries that never goes back."""

from __future__ import annotations

import os
import time
from array import array
from contextlib import suppress
from pathlib import Path

from dynaxla.isolation.disk import replace_file

MOST_RECORDS = 1 << 13
"""A journal with more is begun anew."""


class Journal:
    """A file of numbers of 8 bytes, whose sum is how many bytes there are: what was counted once, and what all processes added.

    Nothing is locked: a number is appended by one write. The sum is an estimate, and rather too large: an entry that replaces
    another counts twice until the folder is counted again. The file's time of modification is the latest that was given.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def total(self) -> int | None:
        """The sum; None if nobody knows it, or the journal is so long that it should be begun anew."""
        try:
            return self._append(b"")
        except OSError:
            return None

    def add(self, added_bytes: int) -> int | None:
        """Appends a number; gives what is then `total`."""
        try:
            return self._append(array("q", [added_bytes]).tobytes())
        except (OSError, OverflowError):
            return None

    def settle(self, before: int | None, counted_bytes: int) -> None:
        """Takes over what was counted.

        Args:
            before: the sum when the counting began: what others added since stays added.

        Raises:
            OSError: it cannot be written.
        """
        if before is not None:
            self.add(counted_bytes - before)
        else:
            replace_file(self._path, [array("q", [counted_bytes]).tobytes()], stamp_ns=self.stamp())

    def forget(self) -> None:
        """Removes the journal, so that the next writer counts."""
        with suppress(OSError):
            self._path.unlink()

    def stamp(self) -> int:
        """The time of a use, in nanoseconds since 1970: later than that of any earlier use, also where the clock went back."""
        try:
            latest = os.stat(self._path, follow_symlinks=False).st_mtime_ns
            now = max(time.time_ns(), latest + 1)
            os.utime(self._path, ns=(now, now), follow_symlinks=False)
        except OSError:
            return time.time_ns()
        return now

    def _append(self, record: bytes) -> int | None:
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if record:
                stamp_ns = self.stamp()
                os.write(handle, record)
                os.utime(handle, ns=(stamp_ns, stamp_ns))
            return _sum(os.pread(handle, 8 * MOST_RECORDS + 1, 0))
        finally:
            os.close(handle)


def _sum(records: bytes) -> int | None:
    if len(records) > 8 * MOST_RECORDS or len(records) % 8:
        return None
    total = sum(array("q", records))
    return total if total >= 0 else None
