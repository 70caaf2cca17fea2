"""How many cells a plan gets that is made of the calls' sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from dynaxla.bucketing.planning import Histogram, Plan, plan_buckets

ENOUGH = 1.05
"""Padded elements per true one that are few enough: a program more costs a compile, and gains less than runs differ."""

_FIRST = 8


def fewest_cells(counts: Mapping[tuple[int, ...], int], most: int) -> Plan:
    """The plan of 8, 16, 32 ... cells that pads few enough elements, else that of the most.

    Args:
        counts: how many calls had which sizes, one or two of them.

    Raises:
        OptionError: there is nothing to plan.
    """
    seen = [sizes for sizes, count in counts.items() for _ in range(count)]
    histogram = Histogram()
    for sizes in seen:
        histogram.add(*sizes)
    for cells in itertools.takewhile(lambda n: n < most, (_FIRST << n for n in itertools.count())):
        plan = plan_buckets(histogram, cells)
        if plan.padded_ratio(histogram) <= ENOUGH:
            return plan
    return plan_buckets(histogram, most)


def work(counts: Mapping[tuple[int, ...], int], bucket: Callable[[tuple[int, ...]], tuple[int, ...]]) -> int:
    """The padded elements of all calls together."""
    return sum(math.prod(bucket(sizes)) * count for sizes, count in counts.items())
