"""The caller's end of a request: pieces as they come, blocking or for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from dynaxla.serving.llm.requests import Answer, Chosen, Ended, Piece


class Answering:
    """A `requests.Generation`. The engine puts pieces in, one reader takes them out.

    Args:
        prompt_tokens: of its prompt.
        cancel: called once by `cancel`, from whatever thread.
    """

    def __init__(self, prompt_tokens: int, cancel: Callable[[], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()  # that nobody has read yet
        self._all: list[Piece] = []
        self._error: BaseException | None = None
        self._over = False
        self._wake: Callable[[], object] | None = None

    # The engine's

    def put(self, piece: Piece) -> None:
        """One more piece; the last one has `ended`."""
        self._end(piece, None, over=piece.ended is not None)

    def fail(self, error: BaseException) -> None:
        """Instead of a last piece."""
        self._end(None, error, over=True)

    # The reader's

    def pieces(self) -> Iterator[Piece]:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                piece = self._next()
            if piece is None:
                return
            yield piece
            if piece.ended is not None:
                return

    async def pieces_async(self) -> AsyncIterator[Piece]:
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> object:
            return loop.call_soon_threadsafe(news.set)

        try:
            while True:
                news.clear()
                with self._changed:
                    self._wake = wake
                    piece = self._next() if self._has_news() else None
                    if piece is None and self._over:
                        return
                if piece is None:
                    await news.wait()
                    continue
                yield piece
                if piece.ended is not None:
                    return
        finally:
            with self._changed:
                if self._wake is wake:  # and not that of a reader who came later
                    self._wake = None

    def result(self, timeout_s: float | None = None) -> Answer:
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_s):
                raise TimeoutError(f"no answer within {timeout_s} s")
            if self._error is not None:
                raise self._error
            pieces = list(self._all)
        chosen: list[Chosen] = [token for piece in pieces for token in piece.chosen]
        ended = pieces[-1].ended or Ended.STOP
        return Answer("".join(piece.text for piece in pieces), chosen, ended, self.prompt_tokens, self.cached_tokens)

    def cancel(self) -> None:
        self._cancel()

    def _end(self, piece: Piece | None, error: BaseException | None, *, over: bool) -> None:
        with self._changed:
            if self._over:
                return
            if piece is not None:
                self._pieces.append(piece)
                self._all.append(piece)
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

    def _next(self) -> Piece | None:
        if self._pieces:
            return self._pieces.popleft()
        if self._error is not None:
            raise self._error
        return None
