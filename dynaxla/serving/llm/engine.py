"""The engine: one worker thread takes requests into slots, runs chunks of prompts and steps of answers in turn."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from dynaxla.errors import DeadlineExceeded, NotServing, QueueFull, RequestRejected, RequestTooLarge
from dynaxla.isolation.forking import follow
from dynaxla.serving.events import Outcome
from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.batch_step import Leaving, Stepper
from dynaxla.serving.llm.detokenizer import TextStream, ends_of, not_followed
from dynaxla.serving.llm.events import Answered, Observer, Silent
from dynaxla.serving.llm.generation import Answering
from dynaxla.serving.llm.grammars import Grammars
from dynaxla.serving.llm.model_runner import Runner
from dynaxla.serving.llm.request_queue import WaitingRoom
from dynaxla.serving.llm.requests import Ended, Piece, Sampling
from dynaxla.serving.llm.self_check import try_out
from dynaxla.serving.llm.sequence import Running
from dynaxla.serving.llm.settings import EngineSettings
from dynaxla.serving.llm.slots import Slots

logger = logging.getLogger("dynaxla")

_NEWEST = 0.2  # weight of the newest answer in the average time per request


class LanguageEngine:
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
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.max_length = self.settings.room
        self.max_prompt = self.settings.room - 1
        self._tokenizer, self._clock, self._observer = tokenizer, clock, observer or Silent()
        ends = ends_of(model, tokenizer)
        if ignored := not_followed(model):
            logger.warning(
                "the model's generation config says %s, which requests have to ask for: docs/serving_llm.md", ignored
            )
        with torch.no_grad():
            self._runner = Runner(model, self.settings, sorted(ends))
        self._grammars = Grammars(tokenizer, self._runner.vocabulary)
        self._waiting = WaitingRoom(self.settings.max_queue)
        self._slots = Slots(self.settings.slots, self.settings.least_shared)
        self._stepper = Stepper(self._runner, self._slots, self.settings, ends, self._observer, clock)
        self._done, self._request_s, self._abandoned = 0, 0.0, False
        self._dtype, self._because = model.dtype, ""
        # Not a daemon: Python ends those in the middle of native code, and the process dies of it (SIGABRT).
        self._worker = threading.Thread(target=self._work, name="dynaxla-llm")
        follow(self)

    def after_fork(self) -> None:
        self._waiting.start_over()

    # What callers use

    @property
    def state(self) -> str:
        return self._waiting.state

    @property
    def progress(self) -> tuple[int, int]:
        return self._done, self._runner.programs

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def slots_used(self) -> int:
        return len(self._slots.running)

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drain(math.inf if error is None else 0)

    def start(self) -> None:
        if self._waiting.advance(State.STARTING) is not State.NEW:
            raise NotServing(self.state)
        self._worker.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Waits until requests are accepted.

        Raises:
            NotServing: they are not by then, or never will be.
        """
        state = self._waiting.wait_until_ready(timeout_s)
        if state is not State.SERVING:
            raise NotServing(state, self._because)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, deadline_s: float | None = None) -> Answering:
        try:
            if self._waiting.state is not State.SERVING:
                raise NotServing(self.state, self._because)
            running = self._running(list(prompt), sampling, math.inf if deadline_s is None else deadline_s)
            self._waiting.put(running, self._request_s)
        except (RequestRejected, QueueFull, NotServing) as error:
            self._observer.answered(Answered(_outcome_of(error)))
            raise
        return running.answering

    def drain(self, timeout_s: float) -> None:
        before = self._waiting.advance(State.DRAINING)
        if before is State.NEW:
            self._waiting.advance(State.CLOSED)
        if before.is_before_serving or threading.current_thread() is self._worker:
            return  # nothing was accepted; a warm-up under way ends by itself
        self._worker.join(None if timeout_s == math.inf else timeout_s)
        if self._worker.is_alive():
            self._abandoned = True
            for running in [*self._waiting.take_all(), *self._slots.running]:
                running.answering.fail(NotServing(self.state))

    # What the worker does

    def _work(self) -> None:
        try:
            with torch.no_grad():
                for _ in self._runner.warm_up():
                    self._done += 1
                    if self._waiting.state is not State.STARTING:
                        return
                self._runner.check_once(try_out, partial(try_out, self._runner, self.settings, self._dtype))
                self._runner.forget()
                self._waiting.advance(State.SERVING)
                while self._has_work():
                    self._turn()
        except BaseException as error:  # whatever ended the worker: it is logged, and nobody is left waiting
            logger.error("the engine's worker died", exc_info=error)
            self._because = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._waiting.advance(State.BROKEN)
        finally:
            self._waiting.advance(State.CLOSED)
            for running in [*self._waiting.take_all(), *self._slots.running]:
                self._end(running, Outcome.ABANDONED, NotServing(self.state))

    def _has_work(self) -> bool:
        if self._abandoned:
            return False
        return bool(self._slots.running) or self._waiting.wait()

    def _turn(self) -> None:
        """Leaves out who is gone, lets in who fits, one chunk of prompts, one call of steps."""
        now = self._clock()
        for running in [*self._waiting.take_dead(now), *self._slots.running]:
            if running.cancelled or running.is_late(now):
                self._dismiss(running)
        while self._slots.has_room and (next_one := self._waiting.take()) is not None:
            self._observer.waited(self._clock() - next_one.accepted_at)
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
            self._request_s += _NEWEST * (total_s / self.settings.slots - self._request_s)
        cached = running.answering.cached_tokens
        self._observer.answered(Answered(outcome, total_s, len(running.prompt), cached, len(running.tokens)))
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
        running = Running(prompt, sampling, seed, text, matcher, self._clock(), deadline_s)
        running.answering = Answering(len(prompt), partial(self._forget, running))
        return running

    def _check(self, prompt: Sequence[int], deadline_s: float) -> None:
        if not deadline_s > 0:
            raise RequestRejected(f"deadline_s={deadline_s!r} is no time at all", "give seconds above 0, or None")
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
        self._waiting.wake()


def _outcome_of(error: Exception) -> Outcome:
    """How a request ended that was not accepted."""
    if isinstance(error, QueueFull):
        return Outcome.QUEUE_FULL
    return Outcome.REJECTED if isinstance(error, RequestRejected) else Outcome.NOT_SERVING
