"""Settings of a language model's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.errors import OptionError
from dynaxla.serving.settings import require_positive_int

_CALL = 40  # about the number of tokens that take as long as reading the weights


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

    def __post_init__(self) -> None:
        for name in ("slots", "max_seq_len", "steps", "max_queue", "min_shared_prefix"):
            require_positive_int(name, getattr(self, name))
        for name, most in (("rows", self.slots), ("kv_lengths", self.max_seq_len)):
            values = getattr(self, name)
            for value in values:
                require_positive_int(name, value)
            if not values or list(values) != sorted(set(values)) or values[-1] != most:
                raise OptionError(f"{name}={values!r} do not rise to {most}", f"write {name}=({most},), for instance")
        for rows, tokens in self.prefill_chunks:
            require_positive_int("prefill_chunks", rows)
            require_positive_int("prefill_chunks", tokens)
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
