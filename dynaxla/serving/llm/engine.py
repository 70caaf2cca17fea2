"""The engine: one worker thread takes requests into slots, runs chunks of prompts and steps of answers in turn."""

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
from dynaxla.serving.events import Outcome
from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.batch_step import Leaving, Stepper
from dynaxla.serving.llm.detokenizer import TextStream, ends_of, not_followed
from dynaxla.serving.llm.events import EngineObserver, GenerationFinished
from dynaxla.serving.llm.generation import Answering
from dynaxla.serving.llm.grammars import Grammars
from dynaxla.serving.llm.model_runner import Runner
from dynaxla.serving.llm.requests import Ended, Piece, Sampling
from dynaxla.serving.llm.self_check import try_out
from dynaxla.serving.llm.sequence import Running
from dynaxla.serving.llm.settings import EngineSettings
from dynaxla.serving.llm.slots import Slots
from dynaxla.serving.request_queue import FifoQueue
from dynaxla.serving.worker_server import WorkerServer, require_deadline

logger = logging.getLogger("dynaxla")


class LanguageEngine(WorkerServer[Running, FifoQueue[Running]]):
    """Answers requests with a decoder of transformers. The contract is `requests.Engine`.

        dynaxla.use()
        engine = LanguageEngine(model.to("dynaxla"), tokenizer, EngineSettings(slots=8, rows=(1, 8)))
        engine.start()
        engine.wait_until_ready()
        answer = engine.submit(tokenizer("In the beginning")["input_ids"], Sampling(temperature=0)).result()

    Args:
        model: on torch's device "dynaxla"; it is put into evaluation, and its attention "sdpa" becomes `attention.NAME`.
        tokenizer: transformers'; fast, if there are to be grammars.
        settings: sizes; `EngineSettings()` where left out.
        observer: told of steps and answers.
        clock: seconds, never going back.

    Raises:
        OptionError: the model lies elsewhere, or keeps something else than keys and values of every layer.
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
        self.max_length = self.settings.room
        self.max_prompt = self.settings.room - 1
        self._tokenizer = tokenizer
        ends = ends_of(model, tokenizer)
        if ignored := not_followed(model):
            logger.warning(
                "the model's generation config has %s, which the engine does not apply; requests have to ask for it: "
                "docs/serving_llm.md",
                ignored,
            )
        with torch.no_grad():
            self._runner = Runner(model, self.settings, sorted(ends))
        self._grammars = Grammars(tokenizer, self._runner.vocabulary)
        self._slots = Slots(self.settings.slots, self.settings.least_shared)
        self._stepper = Stepper(self._runner, self._slots, self.settings, ends, self._observer, clock)
        self._programs_ready, self._abandoned, self._dtype = 0, False, model.dtype

    # Called by any thread

    @property
    def progress(self) -> tuple[int, int]:
        return self._programs_ready, self._runner.programs

    @property
    def slots_used(self) -> int:
        return len(self._slots.running)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drain(math.inf if error is None else 0)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, deadline_s: float | None = None) -> Answering:
        with self._count_refusals():
            if self.state is not State.SERVING:
                raise NotServing(self.state, self._failure)
            running = self._running(list(prompt), sampling, math.inf if deadline_s is None else deadline_s)
            self._queue.put([running], self._request_s)
        return running.answering

    # Called by the worker

    @torch.no_grad()
    def _prepare(self) -> None:
        for _ in self._runner.warm_up():
            self._programs_ready += 1
            if self.state is not State.STARTING:
                return
        self._runner.check_once(try_out, partial(try_out, self._runner, self.settings, self._dtype))
        self._runner.forget()

    @torch.no_grad()
    def _serve(self) -> None:
        while not self._abandoned and (self._slots.running or self._queue.wait()):
            self._turn()

    def _unfinished(self) -> list[Running]:
        return [*self._queue.take_all(), *self._slots.running]

    def _give_up(self) -> None:
        self._abandoned = True
        for running in self._unfinished():
            running.answering.fail(NotServing(self.state))

    def _abandon_all(self) -> None:
        for running in self._unfinished():
            self._end(running, Outcome.ABANDONED, NotServing(self.state))

    def _turn(self) -> None:
        """Leaves out who is gone, lets in who fits, one chunk of prompts, one call of steps."""
        now = self._clock()
        for running in [*self._queue.take_obsolete(now), *self._slots.running]:
            if running.is_obsolete(now):
                self._dismiss(running)
        while self._slots.has_room and (next_one := self._queue.take()) is not None:
            self._observer.slot_assigned(self._clock() - next_one.accepted_at)
            self._isolated([next_one], self._stepper.let_in)
        prefilling = [running for running in self._slots.running if running.is_prefilling]
        if prefilling:
            self._isolated(self._stepper.next_chunk(prefilling), self._stepper.prefill)
        decoding = [running for running in self._slots.running if not running.is_prefilling]
        if decoding:
            self._isolated(decoding, partial(self._stepper.decode, steps=1 if prefilling else self.settings.steps))

    def _isolated(self, group: Sequence[Running], run: Callable[[Sequence[Running]], Leaving]) -> None:
        """Runs a group, or each alone where that raises: who fails alone gets the error. Whose answer is there leaves."""
        try:
            leaving = run(group)
        except Exception as error:  # whatever the model raises belongs to the request that caused it, and to no other
            if len(group) > 1:
                logger.warning("a step of %d requests failed and is run again one by one: %r", len(group), error)
                for running in group:
                    self._isolated([running], run)
                return
            self._fail(group[0], error)
            return
        for running, failure in leaving:
            if failure is None:
                self._end(running, Outcome.OK, None)
            else:
                self._fail(running, failure)

    def _fail(self, running: Running, error: Exception) -> None:
        """A request ends by its error, and all do if the slots are gone: a run that fails may have taken their memory."""
        slot = running.slot
        running.forget()
        self._end(running, Outcome.FAILED, error)
        self._empty(slot or 0, error)

    def _dismiss(self, running: Running) -> None:
        """Ends a request that was cancelled or is late. Of a prompt that is not through nobody saw whether it gives numbers: if
        it does not, they would be in every product of the next request with its slot."""
        slot = running.slot if running.is_prefilling else None
        if slot is not None:
            running.forget()
        if running.cancelled:
            running.answering.put(Piece(running.text.finish(), (), Ended.CANCELLED))
            self._end(running, Outcome.CANCELLED, None)
        else:
            self._end(running, Outcome.EXPIRED, DeadlineExceeded(running.deadline_s))
        if slot is not None:
            self._empty(slot, NotServing(self.state))

    def _empty(self, slot: int, error: Exception) -> None:
        """Empties a slot; if slots cannot be written any more, all that are in them end by this error."""
        if self._runner.can_clear(slot):
            return
        logger.error("the cache was lost, and what was in it: %r", error)
        for other in self._slots.running:
            other.forget()
            self._end(other, Outcome.FAILED, error)
        self._slots.forget()
        self._runner.forget()

    def _end(self, running: Running, outcome: Outcome, error: BaseException | None) -> None:
        self._slots.leave(running)
        total_s = self._clock() - running.accepted_at
        if outcome is Outcome.OK:
            self._update_average(total_s / self.settings.slots)
        cached = running.answering.cached_tokens
        event = GenerationFinished(outcome, total_s, len(running.prompt), cached, len(running.tokens))
        self._observer.request_finished(event)
        if error is not None:
            running.answering.fail(error)

    # What callers' threads do

    def _running(self, prompt: list[int], sampling: Sampling, deadline_s: float) -> Running:
        self._check(prompt, deadline_s)
        if any(token >= self._runner.vocabulary for token in sampling.logit_bias or ()):
            raise RequestRejected("logit_bias: there is no such token", f"tokens are below {self._runner.vocabulary}")
        matcher = None if sampling.grammar is None else self._grammars.matcher(sampling.grammar)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        text = TextStream(self._tokenizer, sampling.stop)
        running = Running(prompt, sampling, seed, text, matcher, accepted_at=self._clock(), deadline_s=deadline_s)
        running.answering = Answering(len(prompt), partial(self._forget, running))
        return running

    def _check(self, prompt: Sequence[int], deadline_s: float) -> None:
        require_deadline(deadline_s)
        if not prompt:
            raise RequestRejected("the prompt is empty", "send at least one token")
        if len(prompt) > self.max_prompt:
            raise RequestTooLarge(len(prompt), self.max_prompt)
        wrong = [token for token in prompt if type(token) is not int or not 0 <= token < self._runner.vocabulary]
        if wrong:
            raise RequestRejected(
                f"{wrong[0]!r} is no token", f"tokens are whole numbers below {self._runner.vocabulary}"
            )

    def _forget(self, running: Running) -> None:
        running.cancelled = True
        self._queue.wake_worker()
