"""From a call's arguments to the key of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

from dynaxla.bucketing.bucket_assignments import EXACT, Key, Sizings
from dynaxla.bucketing.size_buckets import SizeSource, Sizing
from dynaxla.isolation.forking import new_lock

__all__ = ["EXACT", "Key", "Keys"]

MOST_REMEMBERED = 4096


class Keys:
    """The keys of one part. Every combination of sizes is bucketed once and remembered. Safe from several threads.

    Symbols that had one size in every call so far have one bucket. At the first call that gives them two sizes, they are two
    for good; programs that are there by then stay in use for the calls whose sizes are equal.

    Sizes may be planned anew. A call then has the key of its cell once the cell's program is there, and until then the key that
    it had, if the program of that is there. What a plan does not cover keeps its key for good. A later plan's cells have the
    programs of the same cells before, and of buckets that have the same sizes.

    Args:
        sizes: where to read every size that varies.
        sizing: its buckets; None where every size is compiled exactly.
        ready: the keys of the programs that are there.
    """

    def __init__(
        self, sizes: Sequence[SizeSource], sizing: Sizing | None, ready: Callable[[], Collection[Key]]
    ) -> None:
        self._sources = tuple(sizes) if sizing is None else sizing.sources
        self._sizings = Sizings(sizing)
        self._ready = ready
        self._keys: dict[tuple[int, ...], Key] = {}
        self._excluded: set[Key] = set()
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

    def sizing_of(self, key: Key) -> Sizing | None:
        """The sizing that a key is a bucket of; None for an exact shape."""
        return self._sizings.of(key)

    def bucket_of(self, key: Key) -> tuple[int, ...]:
        """The sizes of a key's bucket; the key is of no exact shape."""
        return self._sizings.bucket_of(key)

    @property
    def sizing(self) -> Sizing | None:
        """The buckets of sizes that no plan covers; None where there are none."""
        return self._sizings.unplanned

    def plan(self, sizing: Sizing) -> int:
        """Has a plan hold from now on, beside the one before; gives what its keys begin with."""
        with self._lock:
            tag = self._sizings.plan(sizing)
            self._keys = {}
        return tag

    def has(self, values: tuple[int, ...]) -> bool:
        """Whether the program of these sizes is there."""
        return self.of(values) in self._ready()

    def lacks_cell(self, values: Sequence[int]) -> bool:
        """Whether these sizes, which the last plan covers, have no program of its size."""
        return not self._sizings.last_cell(values) & set(self._ready())

    def renew(self) -> None:
        """Programs came or went: sizes that are planned may have other keys."""
        if self._sizings.is_planned:
            with self._lock:
                self._keys = {}

    def superseded(self) -> list[Key]:
        """The programs that no call runs in any more, as all cells of the last plan have theirs."""
        return self._sizings.superseded(list(self._ready()), self._excluded)

    def takes(self, key: Key, values: Sequence[int]) -> bool:
        """Whether the program of a key may be kept, which was asked for by a call of these sizes."""
        sizing = self.sizing_of(key)
        if sizing is None or key in self._excluded:
            return self.of(tuple(values)) == key
        return sizing.fits(values) and sizing.bucket(values) == self.bucket_of(key)

    def larger(self, values: Sequence[int]) -> list[tuple[int, Key]]:
        """The programs that are there whose buckets hold these sizes, the smallest first: the product of each one's sizes,
        and its key."""
        found = [(sizing, key) for key in list(self._ready()) if (sizing := self.sizing_of(key)) is not None]
        buckets = [(sizing, self.bucket_of(key), key) for sizing, key in found]
        held = [
            (math.prod(sizing.spread(bucket)), key) for sizing, bucket, key in buckets if sizing.holds(bucket, values)
        ]
        return sorted(held)

    def elements(self, values: Sequence[int]) -> int:
        """The product of a call's sizes; of one without buckets that of all that varies."""
        sizing = self.sizing
        return math.prod(values if sizing is None else values[: len(sizing.symbols)])

    def exclude(self, bucket: Key) -> None:
        """From now on the sizes of a bucket are compiled exactly."""
        with self._lock:
            self._excluded.add(bucket)
            self._keys = {}

    def exclude_sizing(self, bucket: Key) -> None:
        """From now on the sizing of a bucket has no more keys: sizes that only it is for are compiled exactly."""
        with self._lock:
            self._sizings.exclude(bucket)
            self._keys = {}

    def describe(self, keys: Sequence[Key]) -> str:
        """Which sizes vary among these keys, and how: a sentence for the user."""
        sizes = [key[1:] for key in keys if key[:1] == (EXACT,)]
        sizes += [sizing.spread(self.bucket_of(key)) for key in keys if (sizing := self.sizing_of(key)) is not None]
        columns: dict[tuple[int, ...], SizeSource] = {}
        for source, column in zip(self._sources, zip_longest(*sizes), strict=False):  # buckets leave out the scalars
            columns.setdefault(column, source)  # one symbol is named for all that have the same sizes
        return "; ".join(
            f"{source} has {_listed(seen)}"
            for sizes, source in columns.items()
            if len(seen := {size for size in sizes if size is not None}) > 1
        )

    def _key(self, values: tuple[int, ...]) -> Key:
        if self._sizings.refine(values, self._ready()):
            self._keys = {}
        buckets = (bucket for bucket in self._sizings.buckets(values) if bucket not in self._excluded)
        unplanned = next(buckets, (EXACT, *values) if values else ())
        cells = [cell for cell in self._sizings.cells(values) if cell not in self._excluded]
        ready = self._ready()
        return next((key for key in (*cells, unplanned) if key in ready), cells[0] if cells else unplanned)


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
