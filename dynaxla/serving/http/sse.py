"""Server-sent events (SSE): merges the deltas of several generations into one stream, and notices clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dynaxla.errors import DeadlineExceeded, NotServing, ServingError
from dynaxla.serving.llm.requests import Delta, FinishReason, Generation

MAX_SEND_S = 60.0  # a client may take to read an event
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")
IndexedDelta = tuple[int, Delta]


async def merge_streams(generations: Sequence[Generation], deadline_s: float) -> AsyncGenerator[IndexedDelta]:
    """Yields the deltas of all generations as they come, each with the index of its generation. `aclose` cancels them.

    Args:
        generations: at least one.
        deadline_s: for the error of a generation that ended by its deadline.

    Raises:
        Exception: what the first raised that failed; the others are cancelled.
    """
    coming: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()

    async def read(index: int, generation: Generation) -> None:
        try:
            delta: Delta | None = None
            async for delta in generation.deltas_async():
                coming.put_nowait((index, delta))
            if delta is None or delta.finish_reason is None:
                raise ServingError("the generation stopped without an end")
        except Exception as error:  # whatever the model raises is raised where the deltas are read
            coming.put_nowait((index, error))

    readers = [asyncio.ensure_future(read(index, each)) for index, each in enumerate(generations)]
    try:
        left = len(readers)
        while left:
            index, delta = await coming.get()
            if isinstance(delta, Exception):
                raise delta
            if delta.finish_reason is not None:
                _check_end(delta.finish_reason, deadline_s)
                left -= 1
            yield index, delta
    finally:
        for reader in readers:
            reader.cancel()
        for generation in generations:
            generation.cancel()


def _check_end(finish_reason: FinishReason, deadline_s: float) -> None:
    """Raises if an answer was cut off by something else than its length."""
    if finish_reason is FinishReason.EXPIRED:
        raise DeadlineExceeded(deadline_s)
    if finish_reason in (FinishReason.ABANDONED, FinishReason.CANCELLED):
        raise NotServing("draining")
    if finish_reason is FinishReason.FAILED:
        raise ServingError("the generation failed")


def event(document: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream(Response):
    """Sends events as they come, until they end or the client leaves.

    Args:
        first: event.
        events: that follow; closed at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        self._first = first
        self._events = events
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.wait({sending, gone})
            await self._events.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_part(send, self._first)
            async for each in self._events:
                await self._send_part(send, each)
        except TimeoutError:  # a client that does not read must not occupy a slot: its connection is closed
            return
        await send({"type": "http.response.body", "body": b""})

    async def _send_part(self, send: Send, part: bytes) -> None:
        async with asyncio.timeout(MAX_SEND_S):
            await send({"type": "http.response.body", "body": part, "more_body": True})


async def cancel_on_disconnect(request: Request, answer: Coroutine[Any, Any, Result]) -> Result | None:
    """Awaits the answer. Returns None, with the work cancelled, if the client disconnects first."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.wait({work, gone})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
