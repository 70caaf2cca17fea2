"""Prefill and decode steps of a batch of sequences: fills the rows of one call of a program, and delivers its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dynaxla.errors import NotNumbers
from dynaxla.serving.events import EngineObserver, StepFinished
from dynaxla.serving.llm.model_runner import IDLE_ROW, ModelRunner, RowInput, StepOutput
from dynaxla.serving.llm.sequence import TokenSequence
from dynaxla.serving.llm.slots import SlotTable
from dynaxla.serving.settings import EngineSettings

FinishedSequences = Sequence[tuple[TokenSequence, NotNumbers | None]]
"""Sequences whose answers have ended, each with its error or None."""


@dataclass(slots=True)
class _Work:
    """Tokens that a call was made for, and tokens that it computed."""

    tokens: int = 0
    padded: int = 0


class BatchStepper:
    """Runs steps and delivers their tokens. Used by the worker only.

    Args:
        runner, slots, settings: the engine's.
        ends: end-of-sequence tokens.
        observer: told of every call and token.
        clock: seconds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slots: SlotTable,
        settings: EngineSettings,
        ends: frozenset[int],
        observer: EngineObserver,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._slots, self._settings = runner, slots, settings
        self._ends, self._observer, self._clock = ends, observer, clock

    def admit(self, group: Sequence[TokenSequence]) -> FinishedSequences:
        """Gives each sequence a slot, and the longest prefix of its prompt that is in the kv cache. None of them ends."""
        for sequence in group:
            assign = self._slots.assign(sequence.prompt)
            self._slots.occupy(sequence, assign.slot)
            if assign.source != assign.slot:
                self._runner.copy(assign.source, assign.slot)
            if sequence.changes_logits:
                self._runner.begin(assign.slot, sequence.prompt, sequence.sampling.logit_bias or {})
            sequence.num_computed = sequence.stream.cached_tokens = assign.shared
        return ()

    def next_chunk(self, prefilling: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """The sequences of the next chunk of prompts, oldest first."""
        oldest = sorted(prefilling, key=lambda sequence: sequence.accepted_at)
        rows, _ = self._settings.chunk_for([len(sequence.prompt) - sequence.num_computed for sequence in oldest])
        return oldest[:rows]

    def prefill(self, group: Sequence[TokenSequence]) -> FinishedSequences:
        """Computes a chunk of each prompt. Returns the sequences whose answers end with their first token."""
        shape = self._settings.chunk_for([len(sequence.prompt) - sequence.num_computed for sequence in group])
        group = group[: shape[0]]
        parts = [sequence.prompt[sequence.num_computed : sequence.num_computed + shape[1]] for sequence in group]
        row_inputs = [
            sequence.row_input(left=int(sequence.num_computed + len(part) == len(sequence.prompt)), count=len(part))
            for sequence, part in zip(group, parts, strict=True)
        ]
        idle = shape[0] - len(group)
        kv_length = self._settings.kv_length_for(
            max(shape[1], *(r.num_computed + len(part) for r, part in zip(group, parts)))
        )
        with self._timed("prefill", shape[0], len(group)) as work:
            output = self._runner.prefill([*row_inputs, *[IDLE_ROW] * idle], [*parts, *[()] * idle], shape, kv_length)
            work.tokens, work.padded = sum(map(len, parts)), shape[0] * shape[1]
        for sequence, part in zip(group, parts, strict=True):
            sequence.num_computed += len(part)
        done = [(row, sequence) for row, sequence in enumerate(group) if not sequence.is_prefilling]
        return self._deliver(done, output)

    def decode(self, group: Sequence[TokenSequence], steps: int) -> FinishedSequences:
        """Generates at most `steps` tokens for each sequence. Returns those whose answers end."""
        while move := self._slots.move_to_front(self._settings.rows):
            self._runner.copy(*move)
            self._slots.move(*move)
        if any(sequence.matcher is not None for sequence in group):
            steps = 1
        by_slot = {sequence.slot: sequence for sequence in group if sequence.slot is not None}
        rows = self._settings.rows_for(max(by_slot) + 1)
        max_seq_len = self._settings.max_seq_len
        row_inputs: list[RowInput] = [
            by_slot[slot].row_input(left=by_slot[slot].count_left(max_seq_len)) if slot in by_slot else IDLE_ROW
            for slot in range(rows)
        ]
        kv_length = self._settings.kv_length_for(max(sequence.length for sequence in group) + steps)
        with self._timed("decode", rows, len(group)) as work:
            output = self._runner.decode(row_inputs, steps, kv_length)
            work.tokens = sum(len(output.tokens[slot]) for slot in by_slot)
            work.padded = rows * max(map(len, output.tokens))
        return self._deliver(list(by_slot.items()), output)

    def _deliver(self, rows: Sequence[tuple[int, TokenSequence]], output: StepOutput) -> FinishedSequences:
        leaving: list[tuple[TokenSequence, NotNumbers | None]] = []
        for row, sequence in rows:
            if self._runner.vocabulary in output.tokens[row]:
                explanation = f"the model's logits are NaN after {len(sequence.tokens)} tokens of the answer"
                hint = "look for Inf or NaN in its weights, or load it in a wider dtype"
                leaving.append((sequence, NotNumbers(explanation, hint)))
                continue
            delta = sequence.take(
                output.read_tokens(row, sequence.sampling.logprobs), self._settings.max_seq_len, self._ends
            )
            self._tell_tokens(sequence, len(delta.chosen))
            if delta.finish_reason is not None:
                leaving.append((sequence, None))
            sequence.stream.put(delta)
        return leaving

    def _tell_tokens(self, sequence: TokenSequence, tokens: int) -> None:
        now = self._clock()
        if sequence.last_token_at is None:
            self._observer.first_token(now - sequence.accepted_at)
        elif tokens:
            self._observer.next_tokens(now - sequence.last_token_at, tokens)
        sequence.last_token_at = now

    @contextmanager
    def _timed(self, kind: str, rows: int, used: int) -> Iterator[_Work]:
        """Tells the observer of one call, also if it raises."""
        work, taken, began = _Work(), len(self._slots.sequences), self._clock()
        failed = True
        try:
            yield work
            failed = False
        finally:
            run_s = self._clock() - began
            self._observer.step_finished(StepFinished(kind, rows, used, work.tokens, work.padded, run_s, taken, failed))
