"""Counts of the sizes of a part's calls, and the padding that they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaxla.bucketing.bucket_planner import minimum_saving

Values = tuple[int, ...]

MEMORY = 1024
"""Number of calls after which all earlier counts are halved, so that the counts follow traffic that changes."""

MOST_SIZES = 4096
"""Maximum number of distinct sizes that are counted; with more, a single size says little."""

_FORGOTTEN = 0.2  # counts below this are dropped


class ObservedSizes:
    """Decayed counts of a part's sizes.

    Attributes:
        counts: number of calls per combination of sizes.
        wasted: padding elements (padded less true ones) since this was last set to 0.
    """

    def __init__(self) -> None:
        self.counts: Mapping[Values, float] = {}
        self.wasted = 0.0
        self._calls = 0.0
        self._elements = 0.0
        self._young = 0

    def add(self, calls: Sequence[tuple[Values, int, int]]) -> None:
        """Counts calls; each is (its sizes, its true elements, the elements of its bucket)."""
        counts = dict(self.counts)
        for values, elements, padded in calls:
            if values in counts or len(counts) < MOST_SIZES:
                counts[values] = counts.get(values, 0.0) + 1.0
            self._calls += 1
            self._elements += elements
            self.wasted += padded - elements
        self._young += len(calls)
        if self._young >= MEMORY:
            self._young = 0
            self._calls, self._elements = self._calls / 2, self._elements / 2
            counts = {values: count / 2 for values, count in counts.items() if count > _FORGOTTEN}
        self.counts = counts

    @property
    def price(self) -> float:
        """Minimum padding, in elements, that a new cell must save over the counted calls to be worth one compile."""
        return minimum_saving(self._elements, self._calls)
