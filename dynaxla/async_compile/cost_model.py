"""What a part's runs cost, by program and in eager: decides what serves a call whose own program is not there."""

from __future__ import annotations

import bisect

from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.programs.program_cache import ProgramListener

MAX_PADDING = 2.0
"""Where nothing is measured yet: a larger bucket serves if it has at most so many elements for each of the call's. Its program
does about an eager run's work in about half the time, where ops are fused."""

MAX_EAGER_SIZES = 256
"""Of so many sizes the seconds in eager are remembered."""


class CostModel(ProgramListener):
    """Seconds of one part's runs, by what they ran. The best is kept: what was slower waited for something else.

    The first run of a program, and the first in eager, prepare more than they run: they are left out. Any thread may call
    any method; an observation that is lost is no loss.
    """

    def __init__(self) -> None:
        self._programs: dict[ShapeKey, float | None] = {}
        self._eager: dict[int, float] = {}
        self._elements: tuple[int, ...] = ()
        self._ran_in_eager = False

    def note_program(self, key: ShapeKey, seconds: float) -> None:
        """A run of the program with this key."""
        if key not in self._programs:
            self._programs[key] = None
            return
        best = self._programs[key]
        self._programs[key] = seconds if best is None else min(best, seconds)

    def note_eager(self, elements: int, seconds: float) -> None:
        """A run in eager.

        Args:
            elements: the product of the call's sizes.
        """
        if not self._ran_in_eager:
            self._ran_in_eager = True
        elif elements in self._eager or len(self._eager) < MAX_EAGER_SIZES:
            self._eager[elements] = min(self._eager.get(elements, seconds), seconds)
            self._elements = tuple(sorted(self._eager))

    def on_evict(self, key: ShapeKey) -> None:
        """Drops the program's seconds; another program may come in its place."""
        self._programs.pop(key, None)

    def prefers_program(self, key: ShapeKey, padded: int, elements: int) -> bool:
        """Whether the program of a larger bucket is taken for a call, and not eager.

        Args:
            padded: the product of the bucket's sizes.
            elements: the product of the call's.
        """
        program_s, eager_s = self._programs.get(key), self._in_eager(elements)
        if program_s is None or eager_s is None:
            return padded <= MAX_PADDING * elements
        return program_s <= eager_s

    def _in_eager(self, elements: int) -> float | None:
        """About what eager takes: between two sizes that were seen, in proportion; above the largest one, likewise."""
        seen = self._elements
        if not seen:
            return None
        place = bisect.bisect_left(seen, elements)
        if place == len(seen):
            return self._eager[seen[-1]] * elements / max(seen[-1], 1)
        above = self._eager[seen[place]]
        if place == 0 or seen[place] == elements:
            return above
        low, high, below = seen[place - 1], seen[place], self._eager[seen[place - 1]]
        return below + (above - below) * (elements - low) / (high - low)
