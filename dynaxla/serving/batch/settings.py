"""Settings of the batching server: how requests are batched, bounded and padded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynaxla.bucket_policy import DEFAULT, BucketPolicy, PowersOfTwo
from dynaxla.errors import OptionError
from dynaxla.serving.settings import require_positive_int

MAX_WAIT_S = 60.0
POWERS_OF_TWO = PowersOfTwo()
MAX_ROW_PADDING = 0.25  # of a batch's rows; where padding would be more, fewer requests run


@dataclass(frozen=True, slots=True)
class Settings:
    """Buckets of sizes and of rows; a batch holds requests of one bucket of sizes.

    Attributes:
        max_size: size of the largest request that is served, in elements of the dim that varies; also the largest bucket.
        min_size: size of the smallest request that is served; a smaller one is rejected.
        sizes: the buckets of sizes.
        rows: the buckets of the number of requests in a batch.
        max_batch: most requests in a batch; a bucket of `rows`.
        max_padded: most elements in a batch, padding included (rows times size); None for no limit. Long requests gain
            little from a batch and make each other wait, so their batches are smaller. One request always runs.
        max_wait_s: longest time that a request waits for others of its bucket while the worker is idle, in seconds.
        max_queue: most requests that wait, those in the running batch not counted; the next one gets `QueueFull`.

    Raises:
        OptionError: a value is of the wrong type, outside its range, or contradicts another.
    """

    max_size: int
    min_size: int = 1
    sizes: BucketPolicy = DEFAULT
    rows: BucketPolicy = POWERS_OF_TWO
    max_batch: int = 16
    max_padded: int | None = None
    max_wait_s: float = 0.005
    max_queue: int = 256

    def __post_init__(self) -> None:
        for name in ("max_size", "min_size", "max_batch", "max_queue"):
            require_positive_int(name, getattr(self, name))
        if self.max_padded is not None:
            require_positive_int("max_padded", self.max_padded)
        for name in ("sizes", "rows"):
            _require_policy(name, getattr(self, name))
        _require_seconds("max_wait_s", self.max_wait_s)
        if self.rows.bucket(self.max_batch) != self.max_batch:
            raise OptionError(
                f"max_batch={self.max_batch} is padded to {self.rows.bucket(self.max_batch)} rows",
                f"write max_batch={self.rows.bucket(self.max_batch)}, or list {self.max_batch} among the buckets of rows",
            )
        if self.min_size > self.max_size:
            raise OptionError(f"min_size={self.min_size} is above max_size={self.max_size}", "exchange them")
        if self.max_queue < self.max_batch:
            raise OptionError(
                f"max_queue={self.max_queue} is less than max_batch={self.max_batch}: no batch would ever be full",
                f"write max_queue={self.max_batch} or more",
            )

    def bucket(self, size: int) -> int:
        """The size that a request of this size (`min_size` to `max_size`) is padded to."""
        return min(self.sizes.bucket(size), self.max_size)

    def max_rows(self, bucket: int) -> int:
        """Most requests of this bucket in one batch: a bucket of `rows`."""
        if self.max_padded is None:
            return self.max_batch
        allowed = max(1, min(self.max_batch, self.max_padded // bucket))
        return max(rows for rows in self.rows.buckets(1, allowed) if rows <= allowed)

    def rows_to_run(self, waiting: int, bucket: int) -> int:
        """How many of a bucket's `waiting` requests (>= 1) run in the next batch.

        At most `max_rows`, and fewer where rows of padding would be more than `MAX_ROW_PADDING`: of five requests four run,
        and the fifth goes first in its group's next batch. Where less than half would run, the rows are padded after all.
        """
        count = min(waiting, self.max_rows(bucket))
        padded = self.padded_rows(count, bucket)
        if padded - count <= MAX_ROW_PADDING * padded:
            return count
        fewer = max(rows for rows in self.rows.buckets(1, count) if rows <= count)
        return fewer if 2 * fewer >= count else count

    def padded_rows(self, rows: int, bucket: int) -> int:
        """The number of rows that a batch of this many (1 to `max_rows`) is padded to."""
        return min(self.rows.bucket(rows), self.max_rows(bucket))

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, size), both padded, of a batch, which a warm-up compiles. Largest first."""
        buckets = {min(bucket, self.max_size) for bucket in self.sizes.buckets(self.min_size, self.max_size)}
        found = {
            (min(rows, self.max_rows(bucket)), bucket)
            for bucket in buckets
            for rows in self.rows.buckets(1, self.max_rows(bucket))
        }
        return tuple(sorted(found, key=lambda shape: (shape[0] * shape[1], shape), reverse=True))


def _require_policy(name: str, value: object) -> None:
    if not isinstance(value, BucketPolicy):
        raise OptionError(
            f"{name}={value!r} is not a bucket policy", f"write {name}=dynaxla.PowersOfTwo(), for instance"
        )


def _require_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, int | float) and is_number and 0 <= value <= MAX_WAIT_S):
        raise OptionError(
            f"{name}={value!r} is not a number of seconds from 0 to {MAX_WAIT_S:g}",
            f"write {name}=0.005, for instance",
        )
