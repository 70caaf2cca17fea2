"""All bucket schemes of a part: the one that its calls refine, and the plans made from observed sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dynaxla.bucketing.size_buckets import BucketScheme

ShapeKey = tuple[int, ...]

EXACT = -(1 << 63)
"""The first element of an exact shape's key. No size and no integer input has this value, so no bucket's key begins with it."""

PLANNED = -(1 << 62)
"""The first element (tag) of the keys of a plan's cells: this number for a part's first plan, one less for each later plan with
other classes of equal sizes."""


class BucketSchemes:
    """Maps sizes to the keys that their programs may have, and a key back to its bucket. Does not know the programs.

    The current plan and the one before it are valid; so is every scheme whose classes were split by calls, for the programs
    compiled until then. Only one thread at a time may change it.

    Args:
        scheme: that of the first call; None if every size is compiled exactly.

    Attributes:
        unplanned: the scheme of sizes that no plan covers.
    """

    def __init__(self, scheme: BucketScheme | None) -> None:
        self.unplanned = scheme
        self._coarser: list[tuple[BucketScheme, frozenset[ShapeKey]]] = []
        self._plans: list[tuple[int, BucketScheme]] = []
        self._planned = 0

    @property
    def is_planned(self) -> bool:
        return bool(self._plans)

    def of(self, key: ShapeKey) -> BucketScheme | None:
        """The bucket scheme to which a key belongs; None for the key of an exact shape."""
        if key and key[0] <= PLANNED:
            return next((scheme for tag, scheme in reversed(self._plans) if tag == key[0]), None)
        schemes = [scheme for scheme, _ in self._coarser] + ([] if self.unplanned is None else [self.unplanned])
        return next((scheme for scheme in schemes if scheme.count == len(key)), None)

    def bucket_of(self, key: ShapeKey) -> tuple[int, ...]:
        """The sizes of a key's bucket. The key must not be one of an exact shape."""
        return key[1:] if key and key[0] <= PLANNED else key

    def cells(self, values: Sequence[int]) -> Iterator[ShapeKey]:
        """Yields the keys of the plans' cells that hold these sizes, the current plan's first."""
        for tag, plan in reversed(self._plans):
            if plan.fits(values) and plan.covers(values):
                yield from self._alike(tag, plan, values)

    def buckets(self, values: Sequence[int]) -> Iterator[ShapeKey]:
        """Yields the keys that these sizes have without a plan. The unplanned scheme must fit the sizes."""
        for scheme, programs in self._coarser:
            if scheme.fits(values):
                bucket = scheme.bucket(values)
                if bucket in programs or self.unplanned is None:
                    yield bucket
        if self.unplanned is not None:
            yield self.unplanned.bucket(values)

    def last_cell(self, values: Sequence[int]) -> set[ShapeKey]:
        """Keys of programs that serve these sizes as the current plan's cell does; empty if the plan does not cover them."""
        tag, plan = self._plans[-1]
        return set(self._alike(tag, plan, values)) if plan.fits(values) and plan.covers(values) else set()

    # What changes them

    def refine(self, values: Sequence[int], ready: Collection[ShapeKey]) -> bool:
        """Splits the classes whose symbols differ in a call. Returns whether it split any.

        Args:
            ready: the keys of the compiled programs.
        """
        scheme = self.unplanned
        if scheme is None or scheme.fits(values):
            return False
        programs = frozenset(key for key in list(ready) if self.of(key) is scheme)
        if programs:
            self._coarser.append((scheme, programs))
        self.unplanned = scheme.refine(values)
        return True

    def plan(self, scheme: BucketScheme) -> int:
        """Makes a plan the current one; the one before stays valid. Returns the tag of the plan's keys."""
        last = self._plans[-1:]
        alike = [tag for tag, before in last if before.classes == scheme.classes]
        tag = alike[0] if alike else PLANNED - self._planned
        self._planned += not alike
        self._plans = [*last, (tag, scheme)]
        return tag

    def exclude(self, key: ShapeKey) -> None:
        """Removes the bucket scheme of a key."""
        excluded = self.of(key)
        if key and key[0] <= PLANNED:
            self._plans = [each for each in self._plans if each[0] != key[0]]
        self.unplanned = None if excluded is self.unplanned else self.unplanned
        self._coarser = [(scheme, programs) for scheme, programs in self._coarser if scheme is not excluded]

    def superseded_keys(self, ready: Collection[ShapeKey], excluded: Collection[ShapeKey]) -> list[ShapeKey]:
        """Keys of programs that no call uses any more: those of buckets that the current plan covers, once all of its cells are
        compiled or excluded."""
        if not self._plans:
            return []
        tag, plan = self._plans[-1]
        same = self.unplanned is not None and self.unplanned.classes == plan.classes
        cells = {(tag, *cell) for cell in plan.cells} - set(excluded)
        used = {cell[1:] if same and cell not in ready and cell[1:] in ready else cell for cell in cells}
        if not used <= set(ready):
            return []
        before = [(key, scheme) for key in ready if key not in used and (scheme := self.of(key)) is not None]
        of_older_plans = [key for key in ready if key and EXACT < key[0] <= PLANNED and key[0] not in dict(self._plans)]
        return of_older_plans + [
            key
            for key, scheme in before
            if scheme.classes == plan.classes and plan.covers(plan.spread(self.bucket_of(key)))
        ]

    def _alike(self, tag: int, plan: BucketScheme, values: Sequence[int]) -> Iterator[ShapeKey]:
        """Yields the keys of programs that serve a plan's cell: the cell's own key, and that of a bucket of equal sizes."""
        cell = plan.bucket(values)
        yield (tag, *cell)
        unplanned = self.unplanned
        if unplanned is not None and unplanned.classes == plan.classes and unplanned.holds(cell, values):
            yield cell
