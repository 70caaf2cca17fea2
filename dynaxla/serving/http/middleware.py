"""ASGI middleware: reads the bodies of requests, limited in size and time, and counts requests in Prometheus metrics."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaxla.serving.http.http_errors import CLIENT_GONE, ApiError

MAX_BODY_BYTES = 1 << 20
MAX_UPLOAD_S = 60.0
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_COUNTED = ("/v1/completions", "/v1/chat/completions")


class BodyReader:
    """Reads the whole body before the application begins.

    Refused are bodies above a number of bytes, those that take too long to come, and those that are not there when the
    server closes: it waits for what it has accepted alone.

    Args:
        app: what gets the body.
        closing: set when the port closes.
        most_bytes: the largest body.
        longest_s: seconds that it may take to come.
    """

    def __init__(
        self,
        app: ASGIApp,
        closing: asyncio.Event,
        most_bytes: int = MAX_BODY_BYTES,
        longest_s: float = MAX_UPLOAD_S,
    ) -> None:
        self._app = app
        self._closing = closing
        self._most_bytes = most_bytes
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))  # the HTTP parser lets only digits through
        try:
            if length > self._most_bytes:
                raise self._too_large()
            messages = await self._read(receive)
        except ApiError as refusal:
            return await refusal.response()(scope, receive, send)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> list[Message]:
        """What comes up to the end of the body, or of the connection."""
        messages: list[Message] = []
        got = 0
        closing = asyncio.ensure_future(self._closing.wait())
        end = asyncio.get_running_loop().time() + self._longest_s
        try:
            while not messages or messages[-1].get("more_body"):
                coming = asyncio.ensure_future(receive())
                left = end - asyncio.get_running_loop().time()
                await asyncio.wait({coming, closing}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    raise self._not_received()
                messages.append(coming.result())
                got += len(messages[-1].get("body", b""))
                if got > self._most_bytes:  # without a Content-Length
                    raise self._too_large()
        finally:
            closing.cancel()
        return messages

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._most_bytes} bytes; send less at once"
        return ApiError(413, message, code="body_too_large")

    def _not_received(self) -> ApiError:
        close = {"Connection": "close"}
        if self._closing.is_set():
            return ApiError(503, "the server is closing", "service_unavailable", None, "not_serving", close)
        return ApiError(
            408, f"the body did not come within {self._longest_s:g} s", "timeout", None, "body_timeout", close
        )


@dataclass(slots=True)
class _Sending:
    """An answer on its way: passes its messages on, and remembers how far it came."""

    send: Send
    began: float = field(default_factory=time.monotonic)
    status: int = CLIENT_GONE
    first_s: float | None = None
    whole: bool = False

    async def __call__(self, message: Message) -> None:
        await self.send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began
        self.whole = not message.get("more_body", False)


class RequestCounter:
    """Counts requests of completions by endpoint and status; one whose client left before its answer's end has 499.

    Args:
        app: what answers.
        registry: where to count.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter("http_requests", "Requests by endpoint and status", ["path", "status"], registry=registry)
        self._open = Gauge("http_open_requests", "Requests that are being answered", registry=registry)
        says = "From a request to the first byte of its answer, where that is no error"
        self._first = Histogram("http_first_byte_seconds", says, ["path"], buckets=_SECONDS, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _COUNTED:
            return await self._app(scope, receive, send)
        sending = _Sending(send)
        self._open.inc()
        try:
            await self._app(scope, receive, sending)
        except Exception:
            sending.status, sending.whole = 500, True  # which Starlette answers it with, further out
            raise
        finally:
            self._open.dec()
            self._count.labels(scope["path"], str(sending.status if sending.whole else CLIENT_GONE)).inc()
            if sending.first_s is not None and sending.status == 200:
                self._first.labels(scope["path"]).observe(sending.first_s)
