"""From a call's arguments to the key of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

from dynaxla.bucketing.sizing import SizeSource, Sizing
from dynaxla.isolation.forking import new_lock

Key = tuple[int, ...]

EXACT = -(1 << 63)
"""What the key of an exact shape begins with. No size and no integer input is that number, so it is taken for no bucket."""

MOST_REMEMBERED = 4096


class Keys:
    """The keys of one part. Every combination of sizes is bucketed once and remembered. Safe from several threads.

    Symbols that had one size in every call so far have one bucket. At the first call that gives them two sizes, they are two
    for good; programs that are there by then stay in use for the calls whose sizes are equal.

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
        if key[:1] == (EXACT,):
            return None
        sizings = [sizing for sizing, _ in self._coarser] + ([] if self._sizing is None else [self._sizing])
        return next((sizing for sizing in sizings if sizing.count == len(key)), None)

    def bucket_of(self, key: Key) -> tuple[int, ...]:
        """The sizes that a key is of, which is no exact shape."""
        return key

    def larger(self, values: Sequence[int]) -> list[tuple[int, Key]]:
        """The programs that are there whose buckets hold these sizes, the smallest first: the product of each one's sizes,
        and its key."""
        found = [(sizing, key) for key in list(self._ready()) if (sizing := self.sizing_of(key)) is not None]
        held = [(math.prod(sizing.spread(key)), key) for sizing, key in found if sizing.holds(key, values)]
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
            self._sizing = None if excluded is self._sizing else self._sizing
            self._coarser = [(sizing, ready) for sizing, ready in self._coarser if sizing is not excluded]
            self._keys = {}

    def describe(self, keys: Sequence[Key]) -> str:
        """Which sizes vary among these keys, and how: a sentence for the user."""
        sizes = [key[1:] for key in keys if key[:1] == (EXACT,)]
        sizes += [sizing.spread(key) for key in keys if (sizing := self.sizing_of(key)) is not None]
        columns: dict[tuple[int, ...], SizeSource] = {}
        for source, column in zip(self._sources, zip_longest(*sizes), strict=False):  # buckets leave out the scalars
            columns.setdefault(column, source)  # one symbol is named for all that have the same sizes
        return "; ".join(
            f"{source} has {_listed(seen)}"
            for sizes, source in columns.items()
            if len(seen := {size for size in sizes if size is not None}) > 1
        )

    def _key(self, values: tuple[int, ...]) -> Key:
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


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
