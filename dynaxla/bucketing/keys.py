"""From a call's arguments to the key of its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaxla.bucketing.plan import BucketPlan, SizeSource

Key = tuple[int, ...]

EXACT = -1
"""What the key of an exact shape begins with: its sizes are never taken for a bucket."""

MOST_REMEMBERED = 4096


class Keys:
    """The keys of one part. Every combination of sizes is bucketed once and remembered.

    Args:
        sizes: where to read every size that varies.
        plan: its buckets; None where every size is compiled exactly.
    """

    def __init__(self, sizes: Sequence[SizeSource], plan: BucketPlan | None) -> None:
        self.plan = plan
        self._sources = tuple(sizes) if plan is None else plan.sources
        self._keys: dict[tuple[int, ...], Key] = {}
        self._refused: set[Key] = set()

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
            if len(self._keys) >= MOST_REMEMBERED:
                self._keys = {}
            key = self._keys[values] = self._key(values)
        return key

    def refuse(self, bucket: Key) -> None:
        """From now on the sizes of a bucket are compiled exactly."""
        self._refused.add(bucket)
        self._keys = {}

    def describe(self, keys: Sequence[Key]) -> str:
        """Which sizes vary among these keys, and how: a sentence for the user."""
        sizes = [key[1:] if key[:1] == (EXACT,) else key for key in keys]
        alike = [each for each in sizes if len(each) == len(self._sources)]  # not those of an earlier plan
        columns = zip(self._sources, zip(*alike, strict=True), strict=True)
        return "; ".join(f"{source} has {_listed(set(column))}" for source, column in columns if len(set(column)) > 1)

    def _key(self, values: tuple[int, ...]) -> Key:
        if self.plan is not None:
            bucket = self.plan.bucket(values)
            if bucket not in self._refused:
                return bucket
        return (EXACT, *values) if values else ()


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
