"""The engine: continuous batching of a language model. One worker thread alternates chunks of prompts and decode steps."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from dynaxla.errors import DeadlineExceeded, NotServing, RequestRejected, RequestTooLarge
from dynaxla.serving.events import EngineObserver, GenerationFinished, Outcome
from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.batch_step import BatchStepper, FinishedSequences
from dynaxla.serving.llm.detokenizer import Detokenizer, eos_tokens_of, ignored_generation_config
from dynaxla.serving.llm.generation import GenerationStream
from dynaxla.serving.llm.grammars import GrammarCompiler
from dynaxla.serving.llm.model_runner import ModelRunner, check_against_model
from dynaxla.serving.llm.requests import Delta, FinishReason, SamplingParams
from dynaxla.serving.llm.sequence import TokenSequence
from dynaxla.serving.llm.slots import SlotTable
from dynaxla.serving.request_queue import FifoQueue
from dynaxla.serving.settings import EngineSettings
from dynaxla.serving.worker_server import WorkerServer, require_deadline

logger = logging.getLogger("dynaxla")


class LanguageEngine(WorkerServer[TokenSequence, FifoQueue[TokenSequence]]):
    """Answers requests with a decoder of transformers. The contract is `requests.Engine`.

        dynaxla.use()
        engine = LanguageEngine(model.to("dynaxla"), tokenizer, EngineSettings(slots=8, rows=(1, 8)))
        engine.start()
        engine.wait_until_ready()
        answer = engine.submit(tokenizer("In the beginning")["input_ids"], Sampling(temperature=0)).result()

    Args:
        model: on torch's device "dynaxla", or for `tensor_parallel` also on the host: no device has all of it then. Set to
            evaluation mode, with attention `attention.NAME` instead of "sdpa".
        tokenizer: of transformers; a fast one for grammars.
        settings: sizes; `EngineSettings()` where left out.
        observer: told of steps and of requests' ends.
        clock: seconds, never going back.

    Raises:
        OptionError: the model is on another device, its cache is not the keys and values of every layer, or it cannot be split
            over `tensor_parallel` devices.
        ShardingError: there are fewer devices, or they do not divide a dim that the model's plan splits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        settings: EngineSettings | None = None,
        *,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or EngineSettings()
        self._observer = observer or EngineObserver()
        super().__init__(FifoQueue(self.settings.max_queue), self._observer, clock, "dynaxla-llm")
        self.max_length = self.settings.max_seq_len
        self.max_prompt = self.settings.max_seq_len - 1
        self._tokenizer = tokenizer
        ends = eos_tokens_of(model, tokenizer)
        if ignored := ignored_generation_config(model):
            logger.warning(
                "the model's generation config has %s, which the engine does not apply; requests have to ask for it: "
                "docs/serving_llm.md",
                ignored,
            )
        with torch.no_grad():
            self._runner = ModelRunner(model, self.settings, sorted(ends))
        logger.info(
            "the kv cache takes %.1f MB on %s",
            self.cache_bytes / 1e6,
            "one device" if self.settings.tensor_parallel == 1 else f"each of {self.settings.tensor_parallel} devices",
        )
        self._grammars = GrammarCompiler(tokenizer, self._runner.vocabulary)
        self._slots = SlotTable(self.settings.slots, self.settings.min_shared_prefix)
        self._stepper = BatchStepper(self._runner, self._slots, self.settings, ends, self._observer, clock)
        self._programs_ready, self._abandoned, self._dtype = 0, False, model.dtype

    # Called by any thread

    @property
    def progress(self) -> tuple[int, int]:
        return self._programs_ready, self._runner.programs

    @property
    def cache_bytes(self) -> int:
        """The bytes of the kv cache on each device."""
        return self._runner.cache_bytes

    @property
    def slots_used(self) -> int:
        return len(self._slots.sequences)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drain(math.inf if error is None else 0)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, deadline_s: float | None = None
    ) -> GenerationStream:
        with self._count_refusals():
            if self.state is not State.SERVING:
                raise NotServing(self.state, self._failure)
            sequence = self._new_sequence(list(prompt), sampling, math.inf if deadline_s is None else deadline_s)
            self._queue.put([sequence], self._request_s)
        return sequence.stream

    # Called by the worker

    @torch.no_grad()
    def _prepare(self) -> None:
        for _ in self._runner.warm_up():
            self._programs_ready += 1
            if self.state is not State.STARTING:
                return
        self._runner.check_once(
            check_against_model, partial(check_against_model, self._runner, self.settings, self._dtype)
        )
        self._runner.forget()

    @torch.no_grad()
    def _serve(self) -> None:
        while not self._abandoned and (self._slots.sequences or self._queue.wait()):
            self._turn()

    def _unfinished(self) -> list[TokenSequence]:
        return [*self._queue.take_all(), *self._slots.sequences]

    def _give_up(self) -> None:
        self._abandoned = True
        for sequence in self._unfinished():
            sequence.stream.fail(NotServing(self.state))

    def _abandon_all(self) -> None:
        for sequence in self._unfinished():
            self._end(sequence, Outcome.ABANDONED, NotServing(self.state))

    def _turn(self) -> None:
        """Drops obsolete sequences, admits new ones to free slots, runs one chunk of prompts and one call of decode steps."""
        now = self._clock()
        for sequence in [*self._queue.take_obsolete(now), *self._slots.sequences]:
            if sequence.is_obsolete(now):
                self._dismiss(sequence)
        while self._slots.has_room and (next_one := self._queue.take()) is not None:
            self._observer.slot_assigned(self._clock() - next_one.accepted_at)
            self._run_isolated([next_one], self._stepper.admit)
        prefilling = [sequence for sequence in self._slots.sequences if sequence.is_prefilling]
        if prefilling:
            self._run_isolated(self._stepper.next_chunk(prefilling), self._stepper.prefill)
        decoding = [sequence for sequence in self._slots.sequences if not sequence.is_prefilling]
        if decoding:
            self._run_isolated(decoding, partial(self._stepper.decode, steps=1 if prefilling else self.settings.steps))

    def _run_isolated(
        self, group: Sequence[TokenSequence], run: Callable[[Sequence[TokenSequence]], FinishedSequences]
    ) -> None:
        """Runs a group, or each sequence alone if that raises; one that fails alone gets the error. Ends finished sequences."""
        try:
            leaving = run(group)
        except Exception as error:  # whatever the model raises belongs to the request that caused it, and to no other
            if len(group) > 1:
                logger.warning("a step of %d sequences failed and is run again for each alone: %r", len(group), error)
                for sequence in group:
                    self._run_isolated([sequence], run)
                return
            self._fail(group[0], error)
            return
        for sequence, failure in leaving:
            if failure is None:
                self._end(sequence, Outcome.OK, None)
            else:
                self._fail(sequence, failure)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends a sequence with its error, and all of them if the kv cache is lost: a failed run may have taken its memory."""
        slot = sequence.slot
        sequence.forget()
        self._end(sequence, Outcome.FAILED, error)
        self._clear_slot(slot or 0, error)

    def _dismiss(self, sequence: TokenSequence) -> None:
        """Ends a sequence that was cancelled or is late.

        If its prompt is not computed to the end, its slot is cleared: NaN in it, which nobody has checked for yet, would be in
        every product of the next sequence with that slot.
        """
        slot = sequence.slot if sequence.is_prefilling else None
        if slot is not None:
            sequence.forget()
        if sequence.cancelled:
            sequence.stream.put(Delta(sequence.text.finish(), (), FinishReason.CANCELLED))
            self._end(sequence, Outcome.CANCELLED, None)
        else:
            self._end(sequence, Outcome.EXPIRED, DeadlineExceeded(sequence.deadline_s))
        if slot is not None:
            self._clear_slot(slot, NotServing(self.state))

    def _clear_slot(self, slot: int, error: Exception) -> None:
        """Clears a slot. If the kv cache cannot be written any more, all sequences in it end with this error."""
        if self._runner.can_clear(slot):
            return
        logger.error("the kv cache was lost, and all sequences in it: %r", error)
        for other in self._slots.sequences:
            other.forget()
            self._end(other, Outcome.FAILED, error)
        self._slots.forget()
        self._runner.forget()

    def _end(self, sequence: TokenSequence, outcome: Outcome, error: BaseException | None) -> None:
        self._slots.release(sequence)
        total_s = self._clock() - sequence.accepted_at
        if outcome is Outcome.OK:
            self._update_average(total_s / self.settings.slots)
        cached = sequence.stream.cached_tokens
        event = GenerationFinished(outcome, total_s, len(sequence.prompt), cached, len(sequence.tokens))
        self._observer.request_finished(event)
        if error is not None:
            sequence.stream.fail(error)

    # Called by any thread

    def _new_sequence(self, prompt: list[int], sampling: SamplingParams, deadline_s: float) -> TokenSequence:
        self._check(prompt, deadline_s)
        if any(token >= self._runner.vocabulary for token in sampling.logit_bias or ()):
            raise RequestRejected("logit_bias: there is no such token", f"tokens are below {self._runner.vocabulary}")
        matcher = None if sampling.grammar is None else self._grammars.matcher(sampling.grammar)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        text = Detokenizer(self._tokenizer, sampling.stop)
        sequence = TokenSequence(
            prompt, sampling, seed, text, matcher, accepted_at=self._clock(), deadline_s=deadline_s
        )
        sequence.stream = GenerationStream(len(prompt), partial(self._cancel, sequence))
        return sequence

    def _check(self, prompt: Sequence[int], deadline_s: float) -> None:
        require_deadline(deadline_s)
        if not prompt:
            raise RequestRejected("the prompt is empty", "send at least one token")
        if len(prompt) > self.max_prompt:
            raise RequestTooLarge(len(prompt), self.max_prompt)
        wrong = [token for token in prompt if type(token) is not int or not 0 <= token < self._runner.vocabulary]
        if wrong:
            raise RequestRejected(
                f"{wrong[0]!r} is not a token", f"tokens are whole numbers below {self._runner.vocabulary}"
            )

    def _cancel(self, sequence: TokenSequence) -> None:
        sequence.cancelled = True
        self._queue.wake_worker()
