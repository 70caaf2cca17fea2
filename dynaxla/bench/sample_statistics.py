"""Numbers that outliers do not move: medians and quartiles of samples, and of ratios within one round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.bench.records import BackendResult, CaseResult


@dataclass(frozen=True, slots=True)
class Spread:
    """A median between quartiles."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges between quartiles have a value in common."""
        return self.low <= other.high and other.low <= self.high


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, interpolated; NaN of none."""
    if not values:
        return math.nan
    ordered, place = sorted(values), share * (len(values) - 1)
    below = ordered[math.floor(place)]
    return below + (ordered[math.ceil(place)] - below) * (place - math.floor(place))


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(*(quantile(values, share) for share in (0.25, 0.5, 0.75)))


def find_speedup(case: CaseResult, result: BackendResult) -> Spread | None:
    """How many times as fast as the baseline a backend is: the baseline's time divided by its own, of the same round and
    input; None where one of them has no samples."""
    baseline = case.of(case.baseline)
    if baseline is None or not baseline.samples_s or not result.samples_s:
        return None
    return spread_of([theirs / mine for theirs, mine in zip(baseline.samples_s, result.samples_s)])


def padded_ratio(result: BackendResult) -> float | None:
    """Elements of the buckets per element of the inputs, all calls together; None where nothing varied."""
    true = sum(each for each, _ in result.elements)
    return sum(padded for _, padded in result.elements) / true if true else None
