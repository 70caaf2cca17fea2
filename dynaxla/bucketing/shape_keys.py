"""Shape keys: maps the sizes of a call to the key of the program that serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

from dynaxla.bucketing.bucket_assignments import EXACT, BucketSchemes, ShapeKey
from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource
from dynaxla.isolation.forking import new_lock

__all__ = ["EXACT", "ShapeKey", "ShapeKeys"]

MOST_REMEMBERED = 4096


class ShapeKeys:
    """The shape keys of one part. Every combination of sizes is bucketed once and remembered. Safe from several threads.

    Symbols that were equal in every call so far share one bucket. The first call in which they differ splits them for good;
    programs compiled before stay in use for calls in which they are equal.

    Buckets may be planned again from observed sizes. A call then has the key of its cell as soon as the cell's program is
    compiled, and until then its former key, if that one's program is compiled. Sizes that a plan does not cover keep their
    keys. The cells of a later plan reuse the programs of equal cells and of buckets of equal sizes.

    Args:
        sizes: where to read every symbolic size.
        scheme: the buckets of these sizes; None if every size is compiled exactly.
        ready: returns the keys of the compiled programs.
    """

    def __init__(
        self, sizes: Sequence[SizeSource], scheme: BucketScheme | None, ready: Callable[[], Collection[ShapeKey]]
    ) -> None:
        self._sources = tuple(sizes) if scheme is None else scheme.sources
        self._schemes = BucketSchemes(scheme)
        self._ready = ready
        self._keys: dict[tuple[int, ...], ShapeKey] = {}
        self._excluded: set[ShapeKey] = set()
        self._lock = new_lock()

    @property
    def has_sizes(self) -> bool:
        """Whether there are symbolic sizes."""
        return bool(self._sources)

    def read(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Reads the symbolic sizes of a call from its arguments."""
        return tuple([source.read(args) for source in self._sources])

    def of(self, values: tuple[int, ...]) -> ShapeKey:
        """The key of the program for these sizes: their bucket, or the exact sizes.

        Raises:
            BucketError: a size is above the largest bucket, and its policy says that this is an error.
        """
        key = self._keys.get(values)
        if key is None:
            with self._lock:
                if len(self._keys) >= MOST_REMEMBERED:
                    self._keys = {}
                key = self._key(values)
                self._keys[values] = key
        return key

    def scheme_of(self, key: ShapeKey) -> BucketScheme | None:
        """The bucket scheme to which a key belongs; None for the key of an exact shape."""
        return self._schemes.of(key)

    def bucket_of(self, key: ShapeKey) -> tuple[int, ...]:
        """The sizes of a key's bucket. The key must not be one of an exact shape."""
        return self._schemes.bucket_of(key)

    @property
    def scheme(self) -> BucketScheme | None:
        """The bucket scheme of sizes that no plan covers; None if these are compiled exactly."""
        return self._schemes.unplanned

    def plan(self, scheme: BucketScheme) -> int:
        """Makes a plan the current one; the one before stays valid. Returns the tag with which the plan's keys begin."""
        with self._lock:
            tag = self._schemes.plan(scheme)
            self._keys = {}
        return tag

    def has(self, values: tuple[int, ...]) -> bool:
        """Whether the program for these sizes is compiled."""
        return self.of(values) in self._ready()

    def is_missing_cell(self, values: Sequence[int]) -> bool:
        """Whether the current plan's cell for these sizes has no program yet. The plan must cover the sizes."""
        return not self._schemes.last_cell(values) & set(self._ready())

    def renew(self) -> None:
        """Forgets the keys of planned sizes, which depend on the programs that are compiled. Call it when these change."""
        if self._schemes.is_planned:
            with self._lock:
                self._keys = {}

    def superseded_keys(self) -> list[ShapeKey]:
        """Keys of programs that no call uses any more, because all cells of the current plan are compiled."""
        return self._schemes.superseded_keys(list(self._ready()), self._excluded)

    def takes(self, key: ShapeKey, values: Sequence[int]) -> bool:
        """Whether a program compiled under `key` may still serve the sizes of the call that requested it."""
        scheme = self.scheme_of(key)
        if scheme is None or key in self._excluded:
            return self.of(tuple(values)) == key
        return scheme.fits(values) and scheme.bucket(values) == self.bucket_of(key)

    def larger(self, values: Sequence[int]) -> list[tuple[int, ShapeKey]]:
        """Compiled programs whose buckets hold these sizes, smallest first, as (product of the bucket's sizes, key)."""
        found = [(scheme, key) for key in list(self._ready()) if (scheme := self.scheme_of(key)) is not None]
        buckets = [(scheme, self.bucket_of(key), key) for scheme, key in found]
        held = [
            (math.prod(scheme.spread(bucket)), key) for scheme, bucket, key in buckets if scheme.holds(bucket, values)
        ]
        return sorted(held)

    def elements(self, values: Sequence[int]) -> int:
        """The product of a call's bucketed sizes; without buckets, the product of all symbolic sizes."""
        scheme = self.scheme
        return math.prod(values if scheme is None else values[: len(scheme.symbols)])

    def exclude(self, bucket: ShapeKey) -> None:
        """Compiles the sizes of a bucket exactly from now on."""
        with self._lock:
            self._excluded.add(bucket)
            self._keys = {}

    def exclude_scheme(self, bucket: ShapeKey) -> None:
        """Removes the bucket scheme of a key: sizes that no other scheme holds are compiled exactly from now on."""
        with self._lock:
            self._schemes.exclude(bucket)
            self._keys = {}

    def describe(self, keys: Sequence[ShapeKey]) -> str:
        """A sentence for the user that says which sizes vary among these keys, and how."""
        sizes = [key[1:] for key in keys if key[:1] == (EXACT,)]
        sizes += [scheme.spread(self.bucket_of(key)) for key in keys if (scheme := self.scheme_of(key)) is not None]
        columns: dict[tuple[int, ...], SizeSource] = {}
        for source, column in zip(self._sources, zip_longest(*sizes), strict=False):  # buckets leave out the scalars
            columns.setdefault(column, source)  # one symbol is named for all that have the same sizes
        return "; ".join(
            f"{source} has {_listed(seen)}"
            for sizes, source in columns.items()
            if len(seen := {size for size in sizes if size is not None}) > 1
        )

    def _key(self, values: tuple[int, ...]) -> ShapeKey:
        if self._schemes.refine(values, self._ready()):
            self._keys = {}
        buckets = (bucket for bucket in self._schemes.buckets(values) if bucket not in self._excluded)
        unplanned = next(buckets, (EXACT, *values) if values else ())
        cells = [cell for cell in self._schemes.cells(values) if cell not in self._excluded]
        ready = self._ready()
        return next((key for key in (*cells, unplanned) if key in ready), cells[0] if cells else unplanned)


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    listed = ", ".join(map(str, shown[:8]))
    return f"the sizes {listed}" if len(shown) <= 8 else f"{len(shown)} sizes from {shown[0]} to {shown[-1]}"
