"""Settings of servers: of the batching server, and of a language model's engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.bucket_policy import DEFAULT, BucketPolicy, PowersOfTwo
from dynaxla.errors import OptionError

MAX_WAIT_S = 60.0
POWERS_OF_TWO = PowersOfTwo()
MAX_ROW_PADDING = 0.25  # of a batch's rows; where padding would be more, fewer requests run
_CALL = 40  # about the number of tokens that take as long as reading the weights


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
            _require_positive_int(name, getattr(self, name))
        if self.max_padded is not None:
            _require_positive_int("max_padded", self.max_padded)
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


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The sizes of an engine. Each pair of rows and reach is a program, so few of each keep the warm-up short.

    Attributes:
        slots: most sequences that are generated at once; each has a slot, one row of the kv cache.
        max_seq_len: most tokens of a sequence, prompt and answer together.
        rows: batch sizes that decode steps are compiled for; the largest is `slots`.
        kv_lengths: numbers of positions of the kv cache that attention reads; the largest is `max_seq_len`.
        prefill_chunks: (rows, tokens) of prompts that are computed in one call; one of them has one row.
        steps: most decode steps per call. More steps are fewer calls, and answers that come in larger deltas.
        max_queue: most requests that wait; the next one gets `QueueFull`.
        min_shared_prefix: least number of tokens for which a prefix is copied from another slot.
        tensor_parallel: devices over which the model's weights and the heads of the kv cache are split.

    Raises:
        OptionError: values that contradict each other.
    """

    slots: int = 16
    max_seq_len: int = 1024
    rows: tuple[int, ...] = (1, 4, 16)
    kv_lengths: tuple[int, ...] = (256, 1024)
    prefill_chunks: tuple[tuple[int, int], ...] = ((1, 32), (4, 32), (1, 128))
    steps: int = 4
    max_queue: int = 256
    min_shared_prefix: int = 16
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("slots", "max_seq_len", "steps", "max_queue", "min_shared_prefix", "tensor_parallel"):
            _require_positive_int(name, getattr(self, name))
        for name, most in (("rows", self.slots), ("kv_lengths", self.max_seq_len)):
            values = getattr(self, name)
            for value in values:
                _require_positive_int(name, value)
            if not values or list(values) != sorted(set(values)) or values[-1] != most:
                raise OptionError(f"{name}={values!r} do not rise to {most}", f"write {name}=({most},), for instance")
        for rows, tokens in self.prefill_chunks:
            _require_positive_int("prefill_chunks", rows)
            _require_positive_int("prefill_chunks", tokens)
            if rows > self.slots or tokens > self.max_seq_len:
                raise OptionError(
                    f"prefill_chunks: {(rows, tokens)} exceeds slots={self.slots} or max_seq_len={self.max_seq_len}"
                )
        if not any(rows == 1 for rows, _ in self.prefill_chunks):
            raise OptionError(f"prefill_chunks={self.prefill_chunks!r} have none of one row", "add (1, 32)")
        if self.max_seq_len < 2:
            raise OptionError("max_seq_len below 2 has no room for a prompt and an answer", "write max_seq_len=256")

    def rows_for(self, count: int) -> int:
        """The least compiled number of rows that is enough."""
        return next(rows for rows in self.rows if rows >= count)

    def kv_length_for(self, positions: int) -> int:
        """The least compiled reach that is enough; `max_seq_len` if none is."""
        return next((kv_length for kv_length in self.kv_lengths if kv_length >= positions), self.max_seq_len)

    def chunk_for(self, rests: Sequence[int]) -> tuple[int, int]:
        """The chunk for prompts of which so many tokens are to come, oldest first: that of the most tokens for its time.

        It may take only the first of them, and only a part of each.
        """

        def worth(chunk: tuple[int, int]) -> tuple[float, int]:
            rows, tokens = chunk
            used = sum(min(rest, tokens) for rest in rests[:rows])
            return used / (rows * tokens + _CALL), used

        return max(self.prefill_chunks, key=worth)


def _require_positive_int(name: str, value: object) -> None:
    """Raises:
    OptionError: the value of this setting is no whole number above 0.
    """
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}={value!r} is not a whole number >= 1", f"write {name}=16, for instance")


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
