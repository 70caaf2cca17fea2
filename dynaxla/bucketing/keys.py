"""From a call's arguments to the key of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

from dynaxla.bucketing.plan import BucketPlan, SizeSource
from dynaxla.forking import new_lock

Key = tuple[int, ...]

EXACT = -(1 << 63)
"""What the key of an exact shape begins with, which no size is: it is never taken for a bucket (an integer input may be -1)."""

MOST_REMEMBERED = 4096


class Keys:
    """The keys of one part. Every combination of sizes is bucketed once and remembered. Safe from several threads.

    Symbols that had one size in every call so far have one bucket. At the first call that gives them two sizes, they are two
    for good; programs that are there by then stay in use for the calls whose sizes are equal.

    Args:
        sizes: where to read every size that varies.
        plan: its buckets; None where every size is compiled exactly.
        ready: the keys of the programs that are there.
    """

    def __init__(
        self, sizes: Sequence[SizeSource], plan: BucketPlan | None, ready: Callable[[], Collection[Key]]
    ) -> None:
        self._sources = tuple(sizes) if plan is None else plan.sources
        self._plan = plan
        self._ready = ready
        self._coarser: list[tuple[BucketPlan, frozenset[Key]]] = []
        self._keys: dict[tuple[int, ...], Key] = {}
        self._refused: set[Key] = set()
        self._lock = new_lock()

    def read(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a call."""
        return tuple([source.read(args) for source in self._sources])

    def of(self, values: tuple[int, ...]) -> Key:
        """The key of these sizes: their bucket, or themselves.

        Raises:
            BucketError: a size is above what its policy takes.
        """
        key = self._keys.get(values)
        if key is None:
            with self._lock:
                if len(self._keys) >= MOST_REMEMBERED:
                    self._keys = {}
                key = self._key(values)
                self._keys[values] = key
        return key

    def plan_of(self, key: Key) -> BucketPlan | None:
        """The plan that a key is a bucket of; None for an exact shape."""
        if key[:1] == (EXACT,):
            return None
        plans = [plan for plan, _ in self._coarser] + ([] if self._plan is None else [self._plan])
        return next((plan for plan in plans if plan.count == len(key)), None)

    def larger(self, values: Sequence[int]) -> list[Key]:
        """The programs that are there whose buckets hold these sizes, the smallest first."""
        found = [(plan, key) for key in list(self._ready()) if (plan := self.plan_of(key)) is not None]
        held = [(math.prod(plan.spread(key)), key) for plan, key in found if plan.holds(key, values)]
        return [key for _, key in sorted(held)]

    def refuse(self, bucket: Key) -> None:
        """From now on the sizes of a bucket are compiled exactly."""
        with self._lock:
            self._refused.add(bucket)
            self._keys = {}

    def refuse_plan(self, bucket: Key) -> None:
        """From now on what only the bucket's plan is for is compiled exactly."""
        with self._lock:
            refused = self.plan_of(bucket)
            self._plan = None if refused is self._plan else self._plan
            self._coarser = [(plan, ready) for plan, ready in self._coarser if plan is not refused]
            self._keys = {}

    def describe(self, keys: Sequence[Key]) -> str:
        """Which sizes vary among these keys, and how: a sentence for the user."""
        sizes = [key[1:] for key in keys if key[:1] == (EXACT,)]
        sizes += [plan.spread(key) for key in keys if (plan := self.plan_of(key)) is not None]
        columns: dict[tuple[int, ...], SizeSource] = {}
        for source, column in zip(self._sources, zip_longest(*sizes), strict=False):  # buckets leave out the scalars
            columns.setdefault(column, source)  # of symbols that are one size one says enough
        return "; ".join(
            f"{source} has {_listed(seen)}"
            for sizes, source in columns.items()
            if len(seen := {size for size in sizes if size is not None}) > 1
        )

    def _key(self, values: tuple[int, ...]) -> Key:
        for plan, ready in self._coarser:
            if plan.fits(values):
                bucket = plan.bucket(values)
                if (bucket in ready or self._plan is None) and bucket not in self._refused:
                    return bucket
        if self._plan is not None:
            if not self._plan.fits(values):
                self._refine(self._plan, values)
            bucket = self._plan.bucket(values)
            if bucket not in self._refused:
                return bucket
        return (EXACT, *values) if values else ()

    def _refine(self, plan: BucketPlan, values: tuple[int, ...]) -> None:
        ready = frozenset(key for key in list(self._ready()) if self.plan_of(key) is plan)
        if ready:
            self._coarser.append((plan, ready))
        self._plan = plan.refined(values)
        self._keys = {}


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
