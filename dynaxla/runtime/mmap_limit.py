"""The kernel's limit of memory mappings: each loaded CPU program has three or more, and LLVM aborts when none is left."""

from __future__ import annotations

import gc
from pathlib import Path

from dynaxla.errors import CompileUnavailable

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPPINGS = Path("/proc/self/maps")
_MAPPINGS_PER_PROGRAM = 64
"""Upper bound of a program's mappings. Mappings are counted again after as many loads as the free ones are sure to allow."""
_RESERVED_SHARE = 16
"""1/16 of the limit is reserved for threads, allocators and files."""


class MmapLimit:
    """Raises before the process runs out of memory mappings. Not thread-safe.

    Args:
        most: the kernel's limit per process; None: the limit of /proc/sys/vm/max_map_count, or no limit on other systems.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _limit() if most is None else most
        self._uncounted = 0

    def check(self) -> None:
        """Checks that a program can be loaded; the caller calls it before each load.

        Raises:
            CompileUnavailable: too few mappings are left, even after a garbage collection.
        """
        if self._most is None or self._uncounted > 0:
            self._uncounted -= 1
            return
        room = self._room(self._most)
        if room < 0:
            gc.collect()
            room = self._room(self._most)
        if room < 0:
            raise CompileUnavailable(
                f"the process has nearly all of the {self._most} memory mappings that the kernel lets it have, and each "
                "program takes some",
                hint="raise it (sysctl vm.max_map_count=262144), or have fewer programs: larger buckets, fewer sizes",
            )
        self._uncounted = room // _MAPPINGS_PER_PROGRAM

    def _room(self, most: int) -> int:
        with _MAPPINGS.open("rb") as lines:
            return most - most // _RESERVED_SHARE - sum(1 for _ in lines)


def _limit() -> int | None:
    try:
        _MAPPINGS.open("rb").close()
        return int(_LIMIT.read_text())
    except (OSError, ValueError):
        return None
