"""The HTTP face of a server of embeddings: what is asked, what is answered, and which error has which status.

    POST /embed {"text": "..."} or {"texts": ["...", ...]}, with "deadline_s" and "encoding" ("float" or "base64") if wanted

    200 the embedding(s)      400 empty       413 over-long           422 malformed (no JSON, not the fields above)
    429 the queue is full     503 not serving (starting or draining)  504 the deadline has passed   500 the model failed

Whatever is answered, the connection may be used again. What is refused here counts as rejected, as what the server refuses.

GET /health (is the process all right?), /ready (may it be sent requests?), /metrics (Prometheus). Knows no model.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaxla.errors import (
    DeadlineExceeded,
    DynaxlaError,
    NotServing,
    QueueFull,
    RequestRejected,
    RequestTooLarge,
    ServingError,
)
from dynaxla.serving import Server, State

MOST_BODY_BYTES = 1 << 18
MOST_TEXTS = 64
MOST_CHARACTERS = 20_000
LONGEST_DEADLINE_S = 60.0
MOST_EXPLAINED = 2000  # characters
CLIENT_GONE = 499  # nobody reads it

STATUSES: tuple[tuple[type[ServingError], int], ...] = (
    (RequestTooLarge, 413),
    (RequestRejected, 400),
    (QueueFull, 429),
    (NotServing, 503),
    (DeadlineExceeded, 504),
    (ServingError, 500),
)

Tokens = list[int]
EmbeddingServer = Server[Tokens, np.ndarray]
Answer = TypeVar("Answer")


def _check_unicode(text: str) -> str:
    """JSON's escapes can spell half a surrogate pair, which is no character: tokenizers and UTF-8 have no use for it."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("half a surrogate pair is no character")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


class EmbedRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: Text | None = None
    texts: list[Text] | None = None
    deadline_s: float | None = Field(default=None, gt=0, le=LONGEST_DEADLINE_S)
    encoding: Literal["float", "base64"] = "float"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.texts is None):
            raise ValueError('give "text" or "texts"')
        return self

    def all_texts(self) -> list[str]:
        return [self.text] if self.text is not None else self.texts or []


def create_app(
    server: EmbeddingServer,
    tokenize: Callable[[str], Tokens],
    registry: CollectorRegistry,
    *,
    deadline_s: float = 30.0,
    drain_s: float = 30.0,
) -> FastAPI:
    """The application; starts the server with its own start, and drains it with its end.

    Args:
        server: not yet started.
        tokenize: the tokens of a text.
        registry: what /metrics shows.
        deadline_s: seconds that a request may take which names no deadline of its own.
        drain_s: seconds that the requests accepted may take at the end.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await asyncio.to_thread(server.drain, drain_s)

    app = FastAPI(title="Embeddings", lifespan=lifespan)
    app.state.leaving = False  # set by whoever shuts down: balancers are to look elsewhere
    app.state.closing = asyncio.Event()  # and this when the port closes: bodies are not waited for any more
    app.add_middleware(ReadBody, most_bytes=MOST_BODY_BYTES, closing=app.state.closing, refused=server.count_rejected)
    _add_errors(app, server)
    _add_state(app, server, registry)
    embeddings = Embeddings(server, tokenize, deadline_s)

    @app.post("/embed")
    async def embed(request: Request, asked: EmbedRequest) -> Response:
        return await embeddings.answer(request, asked)

    return app


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What POST /embed does."""

    server: EmbeddingServer
    tokenize: Callable[[str], Tokens]
    deadline_s: float

    async def answer(self, request: Request, asked: EmbedRequest) -> Response:
        texts = asked.all_texts()
        try:
            check_texts(texts)
        except RequestRejected:
            self.server.count_rejected()
            raise
        try:
            payloads = await self._tokenize(texts)
            answer = self.server.answer_all(payloads, asked.deadline_s or self.deadline_s)
            embeddings = await unless_disconnected(request, answer)
        except ServingError:
            raise
        except Exception as error:  # whatever the model raises is this request's alone, and not the connection's
            return _model_error(error)
        if embeddings is None:
            return Response(status_code=CLIENT_GONE)
        encoded = [encode(embedding, asked.encoding) for embedding in embeddings]
        body = {"embedding": encoded[0]} if asked.text is not None else {"embeddings": encoded}
        return _answer({**body, "tokens": sum(map(len, payloads))})

    async def _tokenize(self, texts: list[str]) -> list[Tokens]:
        if sum(map(len, texts)) > MOST_CHARACTERS:  # long work would hold up everybody else's answers
            return await asyncio.to_thread(lambda: [self.tokenize(text) for text in texts])
        return [self.tokenize(text) for text in texts]


def _add_errors(app: FastAPI, server: EmbeddingServer) -> None:
    app.add_exception_handler(ServingError, _serving_error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        server.count_rejected()
        return _refuse(RequestRejected(_what_is_wrong(error), hint="see /docs for what is asked"), 422)

    @app.exception_handler(400)
    async def not_read(request: Request, error: HTTPException) -> Response:
        """FastAPI's own status of a body that its parser stumbles over."""
        server.count_rejected()
        return _refuse(RequestRejected(error.detail, hint="send JSON in UTF-8"), 422)


def _add_state(app: FastAPI, server: EmbeddingServer, registry: CollectorRegistry) -> None:
    """GET /health, /ready and /metrics."""

    @app.get("/health")
    async def health() -> Response:
        return _answer({"state": server.state}, 500 if server.state is State.BROKEN else 200)

    @app.get("/ready")
    async def ready() -> Response:
        state = "leaving" if app.state.leaving else server.state
        return _answer({"state": state}, 200 if state is State.SERVING else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def check_texts(texts: list[str]) -> None:
    """Raises RequestRejected for nothing, RequestTooLarge for more than is looked at."""
    if not texts:
        raise RequestRejected("there is no text", hint='list at least one in "texts"')
    if len(texts) > MOST_TEXTS:
        raise RequestTooLarge(len(texts), MOST_TEXTS)
    for index, text in enumerate(texts):
        if not text.strip():
            raise RequestRejected(f"text {index} is empty", hint="leave it out")
        if len(text) > MOST_CHARACTERS:
            raise RequestTooLarge(len(text), MOST_CHARACTERS)


def encode(embedding: np.ndarray, encoding: str) -> list[float] | str:
    """A JSON value: numbers, or the little-endian float32 bytes in base64."""
    if encoding == "float":
        return list(map(float, embedding))
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, Answer]) -> Answer | None:
    """The answer; None, and the work on it cancelled, if the client hangs up first."""
    work = asyncio.ensure_future(answer)
    hung_up = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({work, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        hung_up.cancel()
        work.cancel()
        await asyncio.wait({work})  # until what it submitted has left the queue


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: a request may hold characters that UTF-8 has not, and errors tell of them."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status = next(status for kind, status in STATUSES if isinstance(error, kind))
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, QueueFull) else {}
    return _refuse(error, status, headers)


def _refuse(error: DynaxlaError, status: int, headers: dict[str, str] | None = None) -> Response:
    return _answer({"error": {"id": error.id, "explanation": error.explanation, "hint": error.hint}}, status, headers)


def _model_error(error: Exception) -> Response:
    explanation = f"the model failed on this request: {type(error).__name__}"
    return _answer({"error": {"id": "", "explanation": explanation, "hint": ""}}, 500)


def _what_is_wrong(error: RequestValidationError) -> str:
    """Each field and what it should be; never what it was, which may be long or no JSON (NaN)."""
    found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return "; ".join(found)[:MOST_EXPLAINED]


class ReadBody:
    """Reads the whole body before the application begins, and only so much of it.

    Refused are bodies above a number of bytes, those whose length is not told, and those that are not there when the
    server closes: it waits for what it has accepted alone.

    Args:
        refused: called for every request that is refused.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, closing: asyncio.Event, refused: Callable[[], None]) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._closing = closing
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        length = int(headers.get(b"content-length", b"0"))  # the HTTP parser lets only digits through
        refusal: Response | None = None
        if b"transfer-encoding" in headers:
            refusal = _refuse(RequestRejected("a body needs a Content-Length", hint="send it whole"), 411)
        elif length > self._most_bytes:
            refusal = _refuse(RequestTooLarge(length, self._most_bytes), 413)
        else:
            messages = await self._read(receive)
            if messages is None:
                refusal = _refuse(NotServing(State.DRAINING), 503, {"Connection": "close"})
        if refusal is not None:
            self._refused()
            return await refusal(scope, receive, send)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> list[Message] | None:
        """What comes up to the end of the body, or of the connection; None if the server closes before."""
        messages: list[Message] = []
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while not messages or messages[-1].get("more_body"):
                coming = asyncio.ensure_future(receive())
                await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    return None
                messages.append(coming.result())
        finally:
            closing.cancel()
        return messages


class LingeringServer(uvicorn.Server):
    """uvicorn's server, which on a signal says it is not ready and serves on for a while before it closes the port."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, linger_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._linger_s = linger_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again, self._app.state.leaving = self._app.state.leaving, True
        if again or not self._linger_s:
            super().handle_exit(sig, frame)
            return
        asyncio.get_running_loop().call_later(self._linger_s, super().handle_exit, sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.closing.set()
        await super().shutdown(sockets)
