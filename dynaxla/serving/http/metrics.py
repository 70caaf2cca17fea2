"""Requests of HTTP as Prometheus metrics, counted around everything that answers them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaxla.serving.http.errors import CLIENT_GONE

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_COUNTED = ("/v1/completions", "/v1/chat/completions")


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
