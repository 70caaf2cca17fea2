"""How an engine is cut to size: plain values, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.errors import OptionError
from dynaxla.serving.settings import require_positive_int

_CALL = 40  # tokens that take as long as reading the weights, about


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The sizes of an engine. Each pair of rows and reach is a program, so few of each keep the warm-up short.

    Attributes:
        slots: most sequences at a time.
        room: tokens of a slot, prompt and answer together.
        rows: numbers of slots that a step is compiled for; the largest is `slots`.
        reaches: numbers of positions that attention reads; the largest is `room`.
        chunks: (rows, tokens) of prompts that run in one call; one of them has one row.
        steps: most tokens per row and call. More are fewer calls, and answers that come in larger pieces.
        max_queue: most requests that wait; the next one gets `QueueFull`.
        least_shared: a prefix of at least so many tokens is copied from another slot.

    Raises:
        OptionError: values that contradict each other.
    """

    slots: int = 16
    room: int = 1024
    rows: tuple[int, ...] = (1, 4, 16)
    reaches: tuple[int, ...] = (256, 1024)
    chunks: tuple[tuple[int, int], ...] = ((1, 32), (4, 32), (1, 128))
    steps: int = 4
    max_queue: int = 256
    least_shared: int = 16

    def __post_init__(self) -> None:
        for name in ("slots", "room", "steps", "max_queue", "least_shared"):
            require_positive_int(name, getattr(self, name))
        for name, most in (("rows", self.slots), ("reaches", self.room)):
            values = getattr(self, name)
            for value in values:
                require_positive_int(name, value)
            if not values or list(values) != sorted(set(values)) or values[-1] != most:
                raise OptionError(f"{name}={values!r} do not rise to {most}", f"write {name}=({most},), for instance")
        for rows, tokens in self.chunks:
            require_positive_int("chunks", rows)
            require_positive_int("chunks", tokens)
            if rows > self.slots or tokens > self.room:
                raise OptionError(f"chunks: {(rows, tokens)} is more than {self.slots} slots or a room of {self.room}")
        if not any(rows == 1 for rows, _ in self.chunks):
            raise OptionError(f"chunks={self.chunks!r} have none of one row", "add (1, 32)")
        if self.room < 2:
            raise OptionError("a room of less than two tokens holds no prompt with an answer", "write room=256")

    def rows_for(self, count: int) -> int:
        """The least compiled number of rows that is enough."""
        return next(rows for rows in self.rows if rows >= count)

    def reach_for(self, positions: int) -> int:
        """The least compiled reach that is enough; `room` if none is."""
        return next((reach for reach in self.reaches if reach >= positions), self.room)

    def chunk_for(self, rests: Sequence[int]) -> tuple[int, int]:
        """The chunk for prompts of which so many tokens are to come, oldest first: that of the most tokens for its time.

        It may take only the first of them, and only a part of each.
        """

        def worth(chunk: tuple[int, int]) -> tuple[float, int]:
            rows, tokens = chunk
            used = sum(min(rest, tokens) for rest in rests[:rows])
            return used / (rows * tokens + _CALL), used

        return max(self.chunks, key=worth)
