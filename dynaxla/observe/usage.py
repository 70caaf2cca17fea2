"""What a process used, as plain numbers: stages of compiling, tiers of the cache, calls by part and bucket."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields

from dynaxla.isolation.forking import new_lock

CALL_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper limits of the classes in which calls are counted by their seconds; one more class has those above."""

OTHER_BUCKETS = "others"
"""Stands for the buckets of a part beyond those that are counted apart."""


@dataclass(frozen=True, slots=True)
class StageUse:
    """A stage of compiling.

    Attributes:
        runs: how often it ran.
        seconds: spent in it.
    """

    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A tier of the cache.

    Attributes:
        hits, misses: values found and not found.
        read_bytes, written_bytes: of values; 0 in memory.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class CrossedBytes:
    """What crossed between the device and the host for an op that the host computed.

    Attributes:
        to_host, to_device: bytes of operands and of results, and of what was written.
    """

    to_host: int = 0
    to_device: int = 0

    def __add__(self, other: CrossedBytes) -> CrossedBytes:
        return CrossedBytes(self.to_host + other.to_host, self.to_device + other.to_device)


@dataclass(frozen=True, slots=True)
class BucketCalls:
    """The calls of a part in one bucket.

    Attributes:
        bucket: its sizes, "8x128"; "exact 5x7" where sizes are not padded, "fixed" where none varies.
        calls: how many.
        programs: how often a program was compiled or loaded for it.
        true_elements: the products of the sizes of the calls, added up.
        padded_elements: the same of the bucket's sizes: divided by `true_elements`, how much padding costs.
    """

    bucket: str
    calls: int = 0
    programs: int = 0
    true_elements: int = 0
    padded_elements: int = 0


@dataclass(frozen=True, slots=True)
class PartCalls:
    """The calls of a compiled part, which are counted with `options={"call_metrics": True}`.

    Attributes:
        function: the user's function.
        part: number of the part among those of the process that are counted.
        seconds: of all calls, until they returned.
        counts: the number of calls by their seconds, in the classes of `CALL_SECONDS` and one more.
        hits: calls whose program was in memory.
        buckets: the calls by bucket.
    """

    function: str
    part: int
    seconds: float
    counts: tuple[int, ...]
    hits: int
    buckets: tuple[BucketCalls, ...]


class CallCounter:
    """Counts the calls of one part. Safe from several threads.

    Args:
        function: the user's function.
        part: number of the part.
        most: buckets that are counted apart.
        describe: the text of a bucket's key.
    """

    def __init__(self, function: str, part: int, most: int, describe: Callable[[Hashable], str]) -> None:
        self._function, self._part, self._most, self._describe = function, part, most, describe
        self._lock = new_lock()
        self._seconds, self._hits = 0.0, 0
        self._counts = [0] * (len(CALL_SECONDS) + 1)
        self._buckets: dict[str, list[int]] = {}
        self._names: dict[Hashable, str] = {}

    def count_call(self, key: Hashable, *, seconds: float, is_hit: bool, true: int, padded: int) -> None:
        """Counts a call in the bucket of this key, of so many elements."""
        with self._lock:
            self._counts[bisect.bisect_left(CALL_SECONDS, seconds)] += 1
            self._seconds += seconds
            self._hits += is_hit
            tally = self._tally(key)
            tally[0] += 1
            tally[2] += true
            tally[3] += padded

    def count_program(self, key: Hashable) -> None:
        """Counts a program that was compiled or loaded for the bucket of this key."""
        with self._lock:
            self._tally(key)[1] += 1

    def snapshot(self) -> PartCalls:
        """The numbers of now."""
        with self._lock:
            buckets = tuple(BucketCalls(name, *tally) for name, tally in self._buckets.items())
            return PartCalls(self._function, self._part, self._seconds, tuple(self._counts), self._hits, buckets)

    def _tally(self, key: Hashable) -> list[int]:
        """The calls, programs, true and padded elements of a bucket."""
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= self._most:
                return self._buckets.setdefault(OTHER_BUCKETS, [0, 0, 0, 0])
            name = self._names[key] = self._describe(key)
        return self._buckets.setdefault(name, [0, 0, 0, 0])
