"""All the sizings of a part: the one that its calls refine, and the plans made of their sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dynaxla.bucketing.size_buckets import Sizing

Key = tuple[int, ...]

EXACT = -(1 << 63)
"""What the key of an exact shape begins with. No size and no integer input is that number, so it is taken for no bucket."""

PLANNED = -(1 << 62)
"""What the keys of a plan's cells begin with: this for the first plan of a part, one less for each later one whose sizes are
other classes."""


class Sizings:
    """Says of sizes which keys their programs may have, and of a key what it stands for. Knows of no programs.

    The last plan and the one before it hold; so does every sizing whose classes calls have split, for the programs that were
    there by then. One thread at a time may change them.

    Args:
        sizing: of the first call; None where every size is compiled exactly.

    Attributes:
        unplanned: the buckets of sizes that no plan covers.
    """

    def __init__(self, sizing: Sizing | None) -> None:
        self.unplanned = sizing
        self._coarser: list[tuple[Sizing, frozenset[Key]]] = []
        self._plans: list[tuple[int, Sizing]] = []
        self._planned = 0

    @property
    def is_planned(self) -> bool:
        return bool(self._plans)

    def of(self, key: Key) -> Sizing | None:
        """The sizing that a key is a bucket of; None for an exact shape."""
        if key and key[0] <= PLANNED:
            return next((sizing for tag, sizing in reversed(self._plans) if tag == key[0]), None)
        sizings = [sizing for sizing, _ in self._coarser] + ([] if self.unplanned is None else [self.unplanned])
        return next((sizing for sizing in sizings if sizing.count == len(key)), None)

    def bucket_of(self, key: Key) -> tuple[int, ...]:
        """The sizes of a key's bucket; the key is of no exact shape."""
        return key[1:] if key and key[0] <= PLANNED else key

    def cells(self, values: Sequence[int]) -> Iterator[Key]:
        """The keys of the plans' cells that hold these sizes, the last plan's first."""
        for tag, plan in reversed(self._plans):
            if plan.fits(values) and plan.covers(values):
                yield from self._alike(tag, plan, values)

    def buckets(self, values: Sequence[int]) -> Iterator[Key]:
        """The keys that these sizes, which the unplanned sizing fits, have without a plan."""
        for sizing, programs in self._coarser:
            if sizing.fits(values):
                bucket = sizing.bucket(values)
                if bucket in programs or self.unplanned is None:
                    yield bucket
        if self.unplanned is not None:
            yield self.unplanned.bucket(values)

    def last_cell(self, values: Sequence[int]) -> set[Key]:
        """The keys whose programs do for these sizes in the last plan; none where it does not cover them."""
        tag, plan = self._plans[-1]
        return set(self._alike(tag, plan, values)) if plan.fits(values) and plan.covers(values) else set()

    # What changes them

    def refine(self, values: Sequence[int], ready: Collection[Key]) -> bool:
        """Splits classes whose symbols have two sizes in a call; whether there are such. `ready`: the programs there are."""
        sizing = self.unplanned
        if sizing is None or sizing.fits(values):
            return False
        programs = frozenset(key for key in list(ready) if self.of(key) is sizing)
        if programs:
            self._coarser.append((sizing, programs))
        self.unplanned = sizing.refined(values)
        return True

    def plan(self, sizing: Sizing) -> int:
        """Has a plan hold from now on, beside the one before; gives what its keys begin with."""
        last = self._plans[-1:]
        alike = [tag for tag, before in last if before.classes == sizing.classes]
        tag = alike[0] if alike else PLANNED - self._planned
        self._planned += not alike
        self._plans = [*last, (tag, sizing)]
        return tag

    def exclude(self, key: Key) -> None:
        """Has the sizing of a key hold no more."""
        excluded = self.of(key)
        if key and key[0] <= PLANNED:
            self._plans = [each for each in self._plans if each[0] != key[0]]
        self.unplanned = None if excluded is self.unplanned else self.unplanned
        self._coarser = [(sizing, programs) for sizing, programs in self._coarser if sizing is not excluded]

    def superseded(self, ready: Collection[Key], excluded: Collection[Key]) -> list[Key]:
        """The programs that no call runs in any more: those of buckets that the last plan covers, once all of its cells have
        theirs, or cannot have them."""
        if not self._plans:
            return []
        tag, plan = self._plans[-1]
        same = self.unplanned is not None and self.unplanned.classes == plan.classes
        cells = {(tag, *cell) for cell in plan.cells} - set(excluded)
        used = {cell[1:] if same and cell not in ready and cell[1:] in ready else cell for cell in cells}
        if not used <= set(ready):
            return []
        before = [(key, sizing) for key in ready if key not in used and (sizing := self.of(key)) is not None]
        of_older_plans = [key for key in ready if key and EXACT < key[0] <= PLANNED and key[0] not in dict(self._plans)]
        return of_older_plans + [
            key
            for key, sizing in before
            if sizing.classes == plan.classes and plan.covers(plan.spread(self.bucket_of(key)))
        ]

    def _alike(self, tag: int, plan: Sizing, values: Sequence[int]) -> Iterator[Key]:
        """The keys whose programs do for a cell: its own, and that of a bucket of the same sizes."""
        cell = plan.bucket(values)
        yield (tag, *cell)
        unplanned = self.unplanned
        if unplanned is not None and unplanned.classes == plan.classes and unplanned.holds(cell, values):
            yield cell
