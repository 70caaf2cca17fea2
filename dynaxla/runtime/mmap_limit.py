"""Memory mappings of the process: each program of the CPU that is loaded has three or more, and LLVM dies for want of one."""

from __future__ import annotations

import gc
from pathlib import Path

from dynaxla.errors import CompileUnavailable

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPPINGS = Path("/proc/self/maps")
_OF_A_PROGRAM = 64
"""More than a program has: so many times less often than programs are loaded are mappings counted."""
_LEFT_ALONE = 16
"""Of the limit this part is left to all else: threads, allocators, files."""


class Mappings:
    """Says in time that no program can be loaded any more. Not safe from several threads.

    Args:
        most: mappings that the kernel lets a process have; None: what Linux says, and any number elsewhere.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _limit() if most is None else most
        self._uncounted = 0

    def check(self) -> None:
        """To be called before a program is loaded.

        Raises:
            CompileUnavailable: there is no room for it, even without what nobody holds.
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
        self._uncounted = room // _OF_A_PROGRAM

    def _room(self, most: int) -> int:
        with _MAPPINGS.open("rb") as lines:
            return most - most // _LEFT_ALONE - sum(1 for _ in lines)


def _limit() -> int | None:
    try:
        _MAPPINGS.open("rb").close()
        return int(_LIMIT.read_text())
    except (OSError, ValueError):
        return None
