"""Reads the bodies of requests, limited in size and time, and parses them as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaxla.serving.http.errors import ApiError, invalid

MAX_BODY_BYTES = 1 << 20
MAX_UPLOAD_S = 60.0


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
                    raise self._not_there()
                messages.append(coming.result())
                got += len(messages[-1].get("body", b""))
                if got > self._most_bytes:  # one whose length was not told
                    raise self._too_large()
        finally:
            closing.cancel()
        return messages

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._most_bytes} bytes; send less at once"
        return ApiError(413, message, code="body_too_large")

    def _not_there(self) -> ApiError:
        close = {"Connection": "close"}
        if self._closing.is_set():
            return ApiError(503, "the server is closing", "service_unavailable", None, "not_serving", close)
        return ApiError(
            408, f"the body did not come within {self._longest_s:g} s", "timeout", None, "body_timeout", close
        )


async def read_json(request: Request) -> dict[str, Any]:
    """The object that is a request's body.

    Raises:
        ApiError: it is not declared as JSON, no JSON in UTF-8, no object, or holds half a surrogate pair.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no page of another site can send unasked
        raise ApiError(415, "send a body of Content-Type: application/json", code="unsupported_media_type")
    return parse_json(await request.body())


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that is written there; see `read_json`."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
        # An escape can spell half a surrogate pair, which is no character: tokenizers and UTF-8 have no use for it.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise invalid("the body is no UTF-8", None, "invalid_json") from None
    except UnicodeEncodeError:
        raise invalid("half a surrogate pair is no character", None, "invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deep", None, "invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is no JSON: {error}", None, "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid("the body is no JSON object", None, "invalid_json")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
