"""Counts of the sizes of a part's calls, and the padding and the seconds that they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dynaxla.bucketing.bucket_planner import SAVED_SHARE, minimum_saving

Values = tuple[int, ...]

MEMORY = 1024
"""Number of calls after which all earlier counts are halved, so that the counts follow traffic that changes."""

LONG = 1 / SAVED_SHARE
"""Where a compile has a price in seconds, counts are halved only once the calls ran for so many compiles: then a compile costs
the share of the calls that a cell has to save in any case."""

MOST_SIZES = 4096
"""Maximum number of distinct sizes that are counted; with more, a single size says little."""

MIN_SAVING_CELLS = 8
"""So many cells' price is that of a plan, where a compile has no price in seconds."""

_FORGOTTEN = 0.2  # counts below this are dropped


class ObservedSizes:
    """Decayed counts of a part's sizes.

    The `compile_s` of methods is the price of a compile in seconds of the calls' runs; 0 where seconds do not count. Who
    compiles once the lack of a program has cost as much as the compile spends at most twice what the best choice in hindsight
    does.

    Attributes:
        counts: number of calls per combination of sizes.
        wasted: padding elements (padded less true ones) since this was last set to 0.
    """

    def __init__(self) -> None:
        self.counts: Mapping[Values, float] = {}
        self.wasted = 0.0
        self._calls = 0.0
        self._elements = 0.0
        self._padded = 0.0
        self._seconds = 0.0
        self._young = 0

    def add(self, calls: Mapping[Values, tuple[int, int, int]], seconds: float, compile_s: float) -> None:
        """Counts calls.

        Args:
            calls: by their sizes: how many, the true elements of one, and those of its bucket.
            seconds: of the runs of their programs.
        """
        counts = dict(self.counts)
        for values, (count, elements, padded) in calls.items():
            if values in counts or len(counts) < MOST_SIZES:
                counts[values] = counts.get(values, 0.0) + count
            self._calls += count
            self._young += count
            self._elements += count * elements
            self._padded += count * padded
            self.wasted += count * (padded - elements)
        self._seconds += seconds
        self.counts = counts
        if self._young >= MEMORY and self._seconds >= LONG * compile_s:
            self._halve()

    def cell_price(self, compile_s: float) -> float:
        """Minimum padding, in elements, that a new cell must save over the counted calls to be worth one compile."""
        least = minimum_saving(self._elements, self._calls)
        if not compile_s:
            return least
        return max(least, compile_s * self._padded / self._seconds) if self._seconds else math.inf

    def plan_price(self, compile_s: float) -> float:
        """Minimum padding, in elements, that a plan must save over the counted calls, and that makes one due."""
        price = self.cell_price(compile_s)
        return price if compile_s else MIN_SAVING_CELLS * price

    def _halve(self) -> None:
        self._young = 0
        self._calls, self._elements = self._calls / 2, self._elements / 2
        self._padded, self._seconds = self._padded / 2, self._seconds / 2
        self.counts = {values: count / 2 for values, count in self.counts.items() if count > _FORGOTTEN}
