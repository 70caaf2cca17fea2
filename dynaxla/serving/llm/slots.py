"""The table of slots: which sequence has which slot, and which tokens are in each slot's kv cache. No threads, no model.

A slot is one row of the kv cache: room for the keys and values of `max_seq_len` tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.serving.llm.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The slot that a sequence gets.

    Attributes:
        slot: of the sequence.
        source: the slot whose kv cache is copied into it first; `slot` if none is.
        shared: how many tokens of its prompt are in the kv cache then.
    """

    slot: int
    source: int
    shared: int


class SlotTable:
    """The slots of an engine.

    Args:
        count: how many there are.
        min_shared_prefix: least number of tokens for which a prefix is copied.
    """

    def __init__(self, count: int, min_shared_prefix: int) -> None:
        self._min_shared_prefix = min_shared_prefix
        self._sequences: list[TokenSequence | None] = [None] * count
        self._cached_tokens: list[Sequence[int]] = [()] * count  # of the last sequence in each free slot

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences that have a slot, by slot."""
        return [sequence for sequence in self._sequences if sequence is not None]

    @property
    def has_room(self) -> bool:
        return None in self._sequences

    def assign(self, prompt: Sequence[int]) -> SlotAssignment:
        """Chooses the free slot with the longest prefix of the prompt, else the lowest. The last token is always computed."""
        free = [slot for slot, sequence in enumerate(self._sequences) if sequence is None]
        shared = [
            min(_common(prompt, self._tokens_in_cache(slot)), len(prompt) - 1) for slot in range(len(self._sequences))
        ]
        own = max(free, key=lambda slot: (shared[slot], -slot))
        best = max(range(len(shared)), key=lambda slot: shared[slot])
        if shared[best] >= max(self._min_shared_prefix, shared[own] + 1):
            return SlotAssignment(free[0], best, shared[best])
        if shared[own] >= self._min_shared_prefix:
            return SlotAssignment(own, own, shared[own])
        return SlotAssignment(free[0], free[0], shared[free[0]])

    def occupy(self, sequence: TokenSequence, slot: int) -> None:
        self._sequences[slot], self._cached_tokens[slot] = sequence, ()
        sequence.slot = slot

    def release(self, sequence: TokenSequence) -> None:
        """Frees the slot; later prompts may share the prefix in its kv cache."""
        slot = sequence.slot
        if slot is not None:
            self._sequences[slot], self._cached_tokens[slot] = None, sequence.tokens_in_cache
            sequence.slot = None

    def move_to_front(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """The (source, target) slots of a sequence to move so that a program of fewer `rows` is enough; else None.

        The caller copies the kv cache, then calls `move`.
        """
        used = [slot for slot, sequence in enumerate(self._sequences) if sequence is not None]
        if not used or next(n for n in rows if n > used[-1]) == next(n for n in rows if n >= len(used)):
            return None
        return used[-1], self._sequences.index(None)

    def move(self, source: int, target: int) -> None:
        sequence = self._sequences[source]
        if sequence is not None:
            self.release(sequence)
            self.occupy(sequence, target)

    def forget(self) -> None:
        """Forgets the tokens of free slots, after the kv cache was cleared."""
        self._cached_tokens = [()] * len(self._cached_tokens)

    def _tokens_in_cache(self, slot: int) -> Sequence[int]:
        sequence = self._sequences[slot]
        return self._cached_tokens[slot] if sequence is None else sequence.tokens_in_cache


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, in tokens."""
    return next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
