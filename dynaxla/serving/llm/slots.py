"""Who is in which slot, and what every slot's cache holds. Knows no threads and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.serving.llm.sequence import Running


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a request goes.

    Attributes:
        slot: its slot.
        source: the slot whose cache is copied first; its own if nothing is.
        shared: how many tokens of its prompt are there then.
    """

    slot: int
    source: int
    shared: int


class Slots:
    """The slots of an engine.

    Args:
        count: how many there are.
        least_shared: fewer tokens are not worth a copy.
    """

    def __init__(self, count: int, least_shared: int) -> None:
        self._least_shared = least_shared
        self._running: list[Running | None] = [None] * count
        self._left: list[Sequence[int]] = [()] * count  # what the last one left behind

    @property
    def running(self) -> list[Running]:
        """By slot."""
        return [running for running in self._running if running is not None]

    @property
    def has_room(self) -> bool:
        return None in self._running

    def seat(self, prompt: Sequence[int]) -> Seat:
        """Where a prompt should go: where most of it is, else the lowest free slot. The last token is always computed."""
        free = [slot for slot, running in enumerate(self._running) if running is None]
        shared = [min(_common(prompt, self._held(slot)), len(prompt) - 1) for slot in range(len(self._running))]
        own = max(free, key=lambda slot: (shared[slot], -slot))
        best = max(range(len(shared)), key=lambda slot: shared[slot])
        if shared[best] >= max(self._least_shared, shared[own] + 1):
            return Seat(free[0], best, shared[best])
        if shared[own] >= self._least_shared:
            return Seat(own, own, shared[own])
        return Seat(free[0], free[0], shared[free[0]])

    def sit(self, running: Running, slot: int) -> None:
        self._running[slot], self._left[slot] = running, ()
        running.slot = slot

    def leave(self, running: Running) -> None:
        """Frees the slot; what its cache holds may be shared."""
        slot = running.slot
        if slot is not None:
            self._running[slot], self._left[slot] = None, running.held
            running.slot = None

    def move_to_front(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """A request that should move, from a slot to another, so that a smaller number of `rows` is enough; else None.

        What is in the cache goes along: the caller copies it, then calls `sit`.
        """
        used = [slot for slot, running in enumerate(self._running) if running is not None]
        if not used or next(n for n in rows if n > used[-1]) == next(n for n in rows if n >= len(used)):
            return None
        return used[-1], self._running.index(None)

    def move(self, source: int, target: int) -> None:
        running = self._running[source]
        if running is not None:
            self.leave(running)
            self.sit(running, target)

    def forget(self) -> None:
        """The caches hold nothing any more."""
        self._left = [()] * len(self._left)

    def _held(self, slot: int) -> Sequence[int]:
        running = self._running[slot]
        return self._left[slot] if running is None else running.held


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
