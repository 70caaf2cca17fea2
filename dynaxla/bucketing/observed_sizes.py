"""What sizes the calls of a part had, and what padding them cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaxla.bucketing import adaptive_plan

Values = tuple[int, ...]

MEMORY = 1024
"""After so many calls each of those before counts half, so that a stream that changes is followed."""

MOST_SIZES = 4096
"""So many different sizes are counted; with more of them single ones say little."""

_FORGOTTEN = 0.2  # less than this counts for nothing


class Traffic:
    """Counts.

    Attributes:
        counts: how many calls had which values.
        wasted: the elements that were padded, the true ones left out, since this was last set to 0.
    """

    def __init__(self) -> None:
        self.counts: Mapping[Values, float] = {}
        self.wasted = 0.0
        self._calls = 0.0
        self._elements = 0.0
        self._young = 0

    def add(self, calls: Sequence[tuple[Values, int, int]]) -> None:
        """Counts calls: the values of each, its true elements, and those of its bucket."""
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
        """The padded elements that a cell of a plan has to save of these calls' to be worth a program."""
        return adaptive_plan.price(self._elements, self._calls)
