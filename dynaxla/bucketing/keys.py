"""From a call's arguments to the key of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from dynaxla.bucketing.sizing import SizeSource, Sizing
from dynaxla.isolation.forking import new_lock

Key = tuple[int, ...]

EXACT = -(1 << 63)
"""What the key of an exact shape begins with. No size and no integer input is that number, so it is taken for no bucket."""

PLANNED = -(1 << 62)
"""What the keys of a plan's cells begin with: this for the first plan of a part, one less for each later one whose sizes are
other classes."""

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
        self._sizing = sizing
        self._ready = ready
        self._coarser: list[tuple[Sizing, frozenset[Key]]] = []
        self._plans: list[tuple[int, Sizing]] = []
        self._planned = 0
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
        if key and key[0] <= PLANNED:
            return next((sizing for tag, sizing in reversed(self._plans) if tag == key[0]), None)
        sizings = [sizing for sizing, _ in self._coarser] + ([] if self._sizing is None else [self._sizing])
        return next((sizing for sizing in sizings if sizing.count == len(key)), None)

    def bucket_of(self, key: Key) -> tuple[int, ...]:
        """The sizes of a key's bucket; the key is of no exact shape."""
        return key[1:] if key and key[0] <= PLANNED else key

    @property
    def sizing(self) -> Sizing | None:
        """The buckets of sizes that no plan covers; None where there are none."""
        return self._sizing

    def plan(self, sizing: Sizing) -> int:
        """Has a plan hold from now on, beside the one before; gives what its keys begin with."""
        with self._lock:
            last = self._plans[-1:]
            alike = [tag for tag, before in last if before.classes == sizing.classes]
            tag = alike[0] if alike else PLANNED - self._planned
            self._planned += not alike
            self._plans = [*last, (tag, sizing)]
            self._keys = {}
        return tag

    def lacks(self, key: Key, values: Sequence[int]) -> bool:
        """Whether these sizes, of a cell of the last plan, have no program of its size."""
        tag, plan = self._plans[-1]
        return key[0] == tag and not set(self._alike(tag, plan, values)) & set(self._ready())

    def renew(self) -> None:
        """Programs came or went: sizes that are planned may have other keys."""
        if self._plans:
            with self._lock:
                self._keys = {}

    def superseded(self) -> list[Key]:
        """The programs that no call runs in any more: those of buckets that the last plan covers, once all of its cells have
        theirs."""
        ready = list(self._ready())
        if not self._plans:
            return []
        tag, plan = self._plans[-1]
        same = self._sizing is not None and self._sizing.classes == plan.classes
        cells = {(tag, *cell) for cell in plan.cells} - self._excluded
        used = {cell[1:] if same and cell not in ready and cell[1:] in ready else cell for cell in cells}
        if not used <= set(ready):
            return []
        before = [(key, sizing) for key in ready if key not in used and (sizing := self.sizing_of(key)) is not None]
        of_older_plans = [key for key in ready if key and EXACT < key[0] <= PLANNED and key[0] not in dict(self._plans)]
        return of_older_plans + [
            key
            for key, sizing in before
            if sizing.classes == plan.classes and plan.covers(plan.spread(self.bucket_of(key)))
        ]

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
        sizing = self._sizing
        return math.prod(values if sizing is None else values[: len(sizing.symbols)])

    def exclude(self, bucket: Key) -> None:
        """From now on the sizes of a bucket are compiled exactly."""
        with self._lock:
            self._excluded.add(bucket)
            self._keys = {}

    def exclude_sizing(self, bucket: Key) -> None:
        """From now on the sizing of a bucket has no more keys: sizes that only it is for are compiled exactly."""
        with self._lock:
            excluded = self.sizing_of(bucket)
            unplanned = excluded is self._sizing or any(excluded is sizing for sizing, _ in self._coarser)
            self._plans = self._plans if unplanned else [each for each in self._plans if each[0] != bucket[0]]
            self._sizing = None if excluded is self._sizing else self._sizing
            self._coarser = [(sizing, ready) for sizing, ready in self._coarser if sizing is not excluded]
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
        unplanned = self._unplanned(values)
        plans = [(tag, sizing) for tag, sizing in reversed(self._plans) if _covers(sizing, values)]
        wanted = [key for tag, sizing in plans for key in self._alike(tag, sizing, values)]
        wanted = [key for key in wanted if key not in self._excluded]
        if not wanted:
            return unplanned
        ready = self._ready()
        return next((key for key in (*wanted, unplanned) if key in ready), wanted[0])

    def _alike(self, tag: int, plan: Sizing, values: Sequence[int]) -> Iterator[Key]:
        """The keys whose programs do for a cell: its own, and that of a bucket of the same sizes."""
        cell = plan.bucket(values)
        yield (tag, *cell)
        if self._sizing is not None and self._sizing.classes == plan.classes and self._sizing.holds(cell, values):
            yield cell

    def _unplanned(self, values: tuple[int, ...]) -> Key:
        for sizing, ready in self._coarser:
            if sizing.fits(values):
                bucket = sizing.bucket(values)
                if (bucket in ready or self._sizing is None) and bucket not in self._excluded:
                    return bucket
        if self._sizing is not None:
            if not self._sizing.fits(values):
                self._refine(self._sizing, values)
            bucket = self._sizing.bucket(values)
            if bucket not in self._excluded:
                return bucket
        return (EXACT, *values) if values else ()

    def _refine(self, sizing: Sizing, values: tuple[int, ...]) -> None:
        ready = frozenset(key for key in list(self._ready()) if self.sizing_of(key) is sizing)
        if ready:
            self._coarser.append((sizing, ready))
        self._sizing = sizing.refined(values)
        self._keys = {}


def _covers(sizing: Sizing, values: Sequence[int]) -> bool:
    """Whether a plan has a cell for these sizes."""
    return sizing.fits(values) and sizing.covers(values)


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
