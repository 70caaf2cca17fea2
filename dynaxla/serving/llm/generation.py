"""The client end of a request: a stream of deltas, blocking or for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from dynaxla.serving.llm.requests import Completion, Delta, FinishReason, GeneratedToken


class GenerationStream:
    """A `requests.Generation`. The worker puts deltas in, one reader takes them out.

    Args:
        prompt_tokens: of its prompt.
        cancel: called once by `cancel`, from whatever thread.
    """

    def __init__(self, prompt_tokens: int, cancel: Callable[[], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: deque[Delta] = deque()  # that nobody has read yet
        self._all: list[Delta] = []
        self._error: BaseException | None = None
        self._over = False
        self._wake: Callable[[], object] | None = None

    # The engine's

    def put(self, delta: Delta) -> None:
        """Adds a delta; the last one has a `finish_reason`."""
        self._end(delta, None, over=delta.finish_reason is not None)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error instead of a last delta."""
        self._end(None, error, over=True)

    # The reader's

    def deltas(self) -> Iterator[Delta]:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                delta = self._next()
            if delta is None:
                return
            yield delta
            if delta.finish_reason is not None:
                return

    async def deltas_async(self) -> AsyncIterator[Delta]:
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> object:
            return loop.call_soon_threadsafe(news.set)

        try:
            while True:
                news.clear()
                with self._changed:
                    self._wake = wake
                    delta = self._next() if self._has_news() else None
                    if delta is None and self._over:
                        return
                if delta is None:
                    await news.wait()
                    continue
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            with self._changed:
                if self._wake is wake:  # and not that of a reader who came later
                    self._wake = None

    def result(self, timeout_s: float | None = None) -> Completion:
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_s):
                raise TimeoutError(f"no answer within {timeout_s} s")
            if self._error is not None:
                raise self._error
            deltas = list(self._all)
        chosen: list[GeneratedToken] = [token for delta in deltas for token in delta.chosen]
        finish_reason = deltas[-1].finish_reason or FinishReason.STOP
        return Completion(
            "".join(delta.text for delta in deltas), chosen, finish_reason, self.prompt_tokens, self.cached_tokens
        )

    def cancel(self) -> None:
        self._cancel()

    def _end(self, delta: Delta | None, error: BaseException | None, *, over: bool) -> None:
        with self._changed:
            if self._over:
                return
            if delta is not None:
                self._pieces.append(delta)
                self._all.append(delta)
            self._error, self._over = error, over
            self._changed.notify_all()
            if self._wake is not None:
                self._tell_loop(self._wake)

    @staticmethod
    def _tell_loop(wake: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            wake()

    def _has_news(self) -> bool:
        return bool(self._pieces) or self._over

    def _next(self) -> Delta | None:
        if self._pieces:
            return self._pieces.popleft()
        if self._error is not None:
            raise self._error
        return None
