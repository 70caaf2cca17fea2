"""An engine without a model, which does what a test says: it spells out a text, waits, fails, expires, is full."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaxla.errors import DeadlineExceeded, NotServing, QueueFull, RequestRejected
from dynaxla.serving.llm.requests import Completion, Delta, FinishReason, GeneratedToken, SamplingParams

SOON_S = 20.0


class FakeGeneration:
    def __init__(self, prompt: Sequence[int], sampling: SamplingParams, deadline_s: float | None) -> None:
        self.prompt, self.sampling, self.deadline_s = list(prompt), sampling, deadline_s
        self.prompt_tokens, self.cached_tokens = len(prompt), len(prompt) // 2
        self.cancelled = threading.Event()
        self.over = threading.Event()
        self.step = 0
        self.accepted_at = time.monotonic()
        self._told: deque[Delta | Exception] = deque()
        self._changed = threading.Condition()
        self._wake: list[Any] = []

    def tell(self, delta: Delta | Exception) -> None:
        with self._changed:
            self._told.append(delta)
            if isinstance(delta, Exception) or delta.finish_reason is not None:
                self.over.set()
            self._changed.notify_all()
            for wake in self._wake:
                wake()

    def deltas(self) -> Iterator[Delta]:
        while True:
            with self._changed:
                assert self._changed.wait_for(lambda: bool(self._told), SOON_S)
                delta = self._told.popleft()
            if isinstance(delta, Exception):
                raise delta
            yield delta
            if delta.finish_reason is not None:
                return

    async def deltas_async(self) -> AsyncIterator[Delta]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._wake.append(lambda: loop.call_soon_threadsafe(there.set))
        while True:
            while self._told:
                delta = self._told.popleft()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    self._wake.clear()
                    return
            await there.wait()
            there.clear()

    def result(self, timeout_s: float | None = None) -> Completion:
        deltas = list(self.deltas())
        chosen = [each for delta in deltas for each in delta.chosen]
        finish_reason = deltas[-1].finish_reason
        assert finish_reason is not None
        return Completion(
            "".join(delta.text for delta in deltas), chosen, finish_reason, self.prompt_tokens, self.cached_tokens
        )

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeEngine:
    """Spells `text`, a byte per step; several generations take turns in `slots` slots.

    Attributes:
        text: of every answer; the end-of-text token follows.
        wait_at: the step before which it waits for `go_on`; None: never.
        fail_at, expire_at: the step at which an answer ends so.
        step_s: seconds that a step takes.
        accepted: every generation there was.
    """

    text: str = "one two three"
    slots: int = 2
    max_queue: int = 10
    max_prompt: int = 256
    max_length: int = 320
    wait_at: int | None = None
    fail_at: int | None = None
    expire_at: int | None = None
    state: str = "not started"
    progress: tuple[int, int] = (0, 4)
    accepted: list[FakeGeneration] = field(default_factory=list)
    starts: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    tokens: Sequence[int] = ()
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.running: list[FakeGeneration] = []
        self.waiting: deque[FakeGeneration] = deque()
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self.starts.set()

    def start(self) -> None:
        self.state = "starting"
        self._worker.start()

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, deadline_s: float | None = None
    ) -> FakeGeneration:
        with self._changed:
            if self.state != "serving":
                raise NotServing(self.state)
            if sampling.grammar is not None and sampling.grammar.text == "(":
                raise RequestRejected("grammar: a ( is open", hint="close it")
            if len(self.waiting) >= self.max_queue:
                raise QueueFull(len(self.waiting), 2.5)
            made = FakeGeneration(prompt, sampling, deadline_s)
            self.accepted.append(made)
            self.waiting.append(made)
            self._changed.notify_all()
            return made

    def drain(self, timeout_s: float) -> None:
        with self._changed:
            before, self.state = self.state, "draining" if self.state == "serving" else "closed"
            self._changed.notify_all()
        if before == "serving":
            self._worker.join(timeout_s)
        with self._changed:
            for each in (*self.running, *self.waiting):
                each.tell(NotServing("draining"))
            self.running, self.waiting = [], deque()
            self.state = "closed"
            self._changed.notify_all()

    def _work(self) -> None:
        while not self.starts.wait(0.01):
            if self.state == "closed":
                return
        self.progress = (4, 4)
        with self._changed:
            self.state = "serving"
        while True:
            with self._changed:
                while self.waiting and len(self.running) < self.slots:
                    self.running.append(self.waiting.popleft())
                if not self.running:
                    if self.state != "serving":
                        return
                    self._changed.wait(0.01)
                    continue
            self._step_all()

    def _step_all(self) -> None:
        time.sleep(self.step_s)
        for each in tuple(self.running):
            self._step(each)
        with self._changed:
            self.running = [each for each in self.running if not each.over.is_set()]
            self.waiting = deque(each for each in self.waiting if not each.cancelled.is_set())

    def _step(self, each: FakeGeneration) -> None:
        if self.wait_at is not None and each.step >= self.wait_at and not each.cancelled.is_set():
            self.reached.set()
            self.go_on.wait(0.002)
            if not self.go_on.is_set():
                late = each.deadline_s is not None and time.monotonic() > each.accepted_at + each.deadline_s
                return each.tell(DeadlineExceeded(each.deadline_s or 0.0)) if late else None
        if each.cancelled.is_set():
            return each.tell(Delta("", (), FinishReason.CANCELLED))
        if each.step == self.fail_at:
            return each.tell(ValueError("a secret"))
        if each.step == self.expire_at:
            return each.tell(DeadlineExceeded(each.deadline_s or 0.0))
        return self._spell(each)

    def _spell(self, each: FakeGeneration) -> None:
        spelled = self.text[: each.step]
        for stop in each.sampling.stop:
            if stop in spelled:  # of one letter here, so that none of it was told before
                return each.tell(Delta("", (), FinishReason.STOP))
        if each.step >= len(self.text):
            return each.tell(Delta("", (), FinishReason.STOP))
        letter = self.text[each.step]
        told = "" if letter in each.sampling.stop else letter
        each.step += 1
        finish_reason = FinishReason.LENGTH if each.step >= each.sampling.max_tokens else None
        return each.tell(Delta(told, [self._chosen(each, letter)], finish_reason))

    def _chosen(self, each: FakeGeneration, letter: str) -> GeneratedToken:
        token = self.tokens[ord(letter)] if self.tokens else 0
        if each.sampling.logprobs is None:
            return GeneratedToken(token)
        top_logprobs = tuple((token + rank, -0.5 - rank) for rank in range(each.sampling.logprobs))
        return GeneratedToken(token, -0.5, top_logprobs)
