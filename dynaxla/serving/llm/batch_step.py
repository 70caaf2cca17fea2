"""One call of a program at a time, for requests that have slots: who takes part, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dynaxla.errors import NotNumbers
from dynaxla.serving.llm.events import EngineObserver, StepFinished
from dynaxla.serving.llm.model_runner import IDLE, Ask, Runner, Told
from dynaxla.serving.llm.sequence import Running
from dynaxla.serving.llm.settings import EngineSettings
from dynaxla.serving.llm.slots import Slots

Leaving = Sequence[tuple[Running, NotNumbers | None]]
"""Those whose answers end, and why if it is by an error."""


@dataclass(slots=True)
class _Work:
    """Tokens that were wanted of a call, and that were computed."""

    tokens: int = 0
    padded: int = 0


class Stepper:
    """Runs steps and delivers what they give. The worker's alone.

    Args:
        runner, slots, settings: the engine's.
        ends: tokens that end a text.
        observer: told of every call and token.
        clock: seconds.
    """

    def __init__(
        self,
        runner: Runner,
        slots: Slots,
        settings: EngineSettings,
        ends: frozenset[int],
        observer: EngineObserver,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._slots, self._settings = runner, slots, settings
        self._ends, self._observer, self._clock = ends, observer, clock

    def let_in(self, group: Sequence[Running]) -> Leaving:
        """Gives each a slot, with what of its prompt is in a cache already; none of them ends."""
        for running in group:
            seat = self._slots.seat(running.prompt)
            self._slots.sit(running, seat.slot)
            if seat.source != seat.slot:
                self._runner.copy(seat.source, seat.slot)
            if running.is_shaped:
                self._runner.begin(seat.slot, running.prompt, running.sampling.logit_bias or {})
            running.filled = running.answering.cached_tokens = seat.shared
        return ()

    def next_chunk(self, prefilling: Sequence[Running]) -> Sequence[Running]:
        """Whose prompts go on next: those that came first."""
        oldest = sorted(prefilling, key=lambda running: running.accepted_at)
        rows, _ = self._settings.chunk_for([len(running.prompt) - running.filled for running in oldest])
        return oldest[:rows]

    def prefill(self, group: Sequence[Running]) -> Leaving:
        """A chunk of each one's prompt; those whose answer ends with its first token."""
        shape = self._settings.chunk_for([len(running.prompt) - running.filled for running in group])
        group = group[: shape[0]]
        parts = [running.prompt[running.filled : running.filled + shape[1]] for running in group]
        asks = [
            running.ask(left=int(running.filled + len(part) == len(running.prompt)), count=len(part))
            for running, part in zip(group, parts, strict=True)
        ]
        idle = shape[0] - len(group)
        reach = self._settings.reach_for(max(shape[1], *(r.filled + len(part) for r, part in zip(group, parts))))
        with self._timed("prefill", shape[0], len(group)) as work:
            told = self._runner.prefill([*asks, *[IDLE] * idle], [*parts, *[()] * idle], shape, reach)
            work.tokens, work.padded = sum(map(len, parts)), shape[0] * shape[1]
        for running, part in zip(group, parts, strict=True):
            running.filled += len(part)
        done = [(row, running) for row, running in enumerate(group) if not running.is_prefilling]
        return self._deliver(done, told)

    def decode(self, group: Sequence[Running], steps: int) -> Leaving:
        """Up to `steps` tokens for each; those whose answers end."""
        while move := self._slots.move_to_front(self._settings.rows):
            self._runner.copy(*move)
            self._slots.move(*move)
        if any(running.matcher is not None for running in group):
            steps = 1
        by_slot = {running.slot: running for running in group if running.slot is not None}
        rows = self._settings.rows_for(max(by_slot) + 1)
        room = self._settings.room
        asks: list[Ask] = [
            by_slot[slot].ask(left=by_slot[slot].left(room)) if slot in by_slot else IDLE for slot in range(rows)
        ]
        reach = self._settings.reach_for(max(running.length for running in group) + steps)
        with self._timed("decode", rows, len(group)) as work:
            told = self._runner.decode(asks, steps, reach)
            work.tokens = sum(len(told.tokens[slot]) for slot in by_slot)
            work.padded = rows * max(map(len, told.tokens))
        return self._deliver(list(by_slot.items()), told)

    def _deliver(self, rows: Sequence[tuple[int, Running]], told: Told) -> Leaving:
        leaving: list[tuple[Running, NotNumbers | None]] = []
        for row, running in rows:
            if self._runner.vocabulary in told.tokens[row]:
                explanation = f"the model's logits are NaN after {len(running.tokens)} tokens of the answer"
                hint = "look for Inf or NaN in its weights, or load it in a wider dtype"
                leaving.append((running, NotNumbers(explanation, hint)))
                continue
            piece = running.take(told.chosen(row, running.sampling.logprobs), self._settings.room, self._ends)
            self._tell_tokens(running, len(piece.chosen))
            if piece.ended is not None:
                leaving.append((running, None))
            running.answering.put(piece)
        return leaving

    def _tell_tokens(self, running: Running, tokens: int) -> None:
        now = self._clock()
        if running.told_at is None:
            self._observer.first_token(now - running.accepted_at)
        elif tokens:
            self._observer.next_tokens(now - running.told_at, tokens)
        running.told_at = now

    @contextmanager
    def _timed(self, kind: str, rows: int, used: int) -> Iterator[_Work]:
        """Tells the observer of one call, also of one that raises."""
        work, taken, began = _Work(), len(self._slots.running), self._clock()
        failed = True
        try:
            yield work
            failed = False
        finally:
            run_s = self._clock() - began
            self._observer.step_finished(StepFinished(kind, rows, used, work.tokens, work.padded, run_s, taken, failed))
