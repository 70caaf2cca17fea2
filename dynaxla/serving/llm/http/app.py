"""The application: OpenAI's endpoints, health, metrics and the chat page around an engine."""

from __future__ import annotations

import asyncio
import hmac
import importlib.resources
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from dynaxla.serving.llm.http.answering import Answering
from dynaxla.serving.llm.http.asking import Job, chat_prompts, completion_prompts, make_job
from dynaxla.serving.llm.http.body import MOST_BODY_BYTES, ReadBody, read_json
from dynaxla.serving.llm.http.errors import CLIENT_GONE, Refusal, invalid, json_response, refusal_of
from dynaxla.serving.llm.http.fields import ChatRequest, CompletionRequest, read_fields
from dynaxla.serving.llm.http.metrics import CountRequests
from dynaxla.serving.llm.http.shapes import ChatShape, Shape, TextShape
from dynaxla.serving.llm.http.streams import EventStream, unless_gone
from dynaxla.serving.llm.http.text import Text
from dynaxla.serving.llm.requests import Engine, Generation
from dynaxla.serving.queue import State

_LONG_TEXT = 20_000  # bytes of a body; to make tokens of more would hold up everybody else's answers
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_app(
    engine: Engine,
    tokenizer: Any,
    name: str,
    registry: CollectorRegistry,
    *,
    api_key: str | None = None,
    deadline_s: float = 600.0,
    drain_s: float = 30.0,
    most_body_bytes: int = MOST_BODY_BYTES,
    watch: Callable[[Engine], None] | None = None,
) -> FastAPI:
    """The application; starts the engine with its own start, and drains it with its end.

    Args:
        engine: not yet started.
        tokenizer: of transformers, a fast one.
        name: of the model, which requests give.
        registry: what /metrics shows.
        api_key: what /v1 wants as bearer; None: nothing.
        deadline_s: seconds that a request may take which names no deadline of its own.
        drain_s: seconds that the requests accepted may take at the end.
        most_body_bytes: the largest body that is read.
        watch: called in a thread of its own once the engine is started: shows how the warm-up goes.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        watching = asyncio.ensure_future(asyncio.to_thread(watch, engine)) if watch else None
        draining = asyncio.ensure_future(_drain_when(app.state.closing, engine, drain_s))
        hurrying = asyncio.ensure_future(_drain_when(app.state.hurry, engine, 0.0))
        yield
        app.state.closing.set()
        await draining
        hurrying.cancel()
        if watching:
            await watching

    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.leaving = False  # set by whoever shuts down: balancers are to look elsewhere
    app.state.closing = asyncio.Event()  # and this when the port closes: bodies are not waited for any more
    app.state.hurry = asyncio.Event()  # and this when answers are not either
    app.add_middleware(ReadBody, closing=app.state.closing, most_bytes=most_body_bytes)
    app.add_middleware(CountRequests, registry=registry)
    _add_errors(app)
    _add_state(app, engine, registry)
    _add_page(app)
    _add_models(app, Models(name, api_key))
    _add_completions(app, Completions(engine, Text(tokenizer), Models(name, api_key), deadline_s))
    return app


async def _drain_when(told: asyncio.Event, engine: Engine, drain_s: float) -> None:
    """Beside the connections that are being answered: what is too late for the drain is told so on each."""
    await told.wait()
    await asyncio.to_thread(engine.drain, drain_s)


@dataclass(frozen=True, slots=True)
class Models:
    """The one model, and who may use it."""

    name: str
    api_key: str | None

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Raises Refusal where the key is wanted and is another."""
        if self.api_key is None:
            return
        given = headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        right = hmac.compare_digest(key.strip().encode("utf-8", "replace"), self.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            message = "this server wants its API key: Authorization: Bearer KEY"
            raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_name(self, name: str) -> None:
        """Raises Refusal where another model is asked for."""
        if name != self.name:
            message = f"there is no model {name[:200]!r} here, only {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def document(self, created: int) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": created, "owned_by": "dynaxla"}


@dataclass(frozen=True, slots=True)
class Completions:
    """What POST /v1/completions and /v1/chat/completions do."""

    engine: Engine
    text: Text
    models: Models
    deadline_s: float

    async def answer_text(self, request: Request) -> Response:
        self.models.check_key(request.headers)
        asked = read_fields(CompletionRequest, await read_json(request))
        self.models.check_name(asked.model)
        prompts = await self._run(request, completion_prompts, asked)
        with_logprobs = asked.logprobs is not None
        shapes: list[Shape] = [
            TextShape(
                index,
                self.text,
                echo=prompts[index // asked.n].text if asked.echo else None,
                with_logprobs=with_logprobs,
            )
            for index in range(len(prompts) * asked.n)
        ]
        return await self._answer(request, asked, prompts, shapes)

    async def answer_chat(self, request: Request) -> Response:
        self.models.check_key(request.headers)
        asked = read_fields(ChatRequest, await read_json(request))
        self.models.check_name(asked.model)
        prompts = await self._run(request, chat_prompts, asked)
        shapes: list[Shape] = [ChatShape(index, self.text, with_logprobs=asked.logprobs) for index in range(asked.n)]
        return await self._answer(request, asked, prompts, shapes)

    async def _run(self, request: Request, make: Callable[[Any, Text], Any], asked: Any) -> Any:
        self.text.check_tokens(map(int, asked.logit_bias or ()), "logit_bias")
        if len(await request.body()) > _LONG_TEXT:
            return await asyncio.to_thread(make, asked, self.text)
        return make(asked, self.text)

    async def _answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, prompts: Any, shapes: list[Shape]
    ) -> Response:
        field = "messages" if isinstance(asked, ChatRequest) else "prompt"
        try:
            job = make_job(asked, prompts, self.engine, self.deadline_s)
            generations = await self._submit(job)
            answering = Answering(job, generations, shapes, self.models.name, field)
            if not asked.stream:
                document = await unless_gone(request, answering.whole())
                return Response(status_code=CLIENT_GONE) if document is None else json_response(document)
            events = answering.events(with_usage=asked.sends_usage)
            first = await unless_gone(request, events.__anext__())
            return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, events)
        except Exception as error:  # whatever the model raises is this request's alone, and not the connection's
            raise refusal_of(error, field) from error

    async def _submit(self, job: Job) -> list[Generation]:
        """A grammar takes up to seconds to read, which would hold up everybody else's answers."""
        if any(sampling.grammar for samplings in job.samplings for sampling in samplings):
            return await asyncio.to_thread(job.submit, self.engine)
        return job.submit(self.engine)


def _add_completions(app: FastAPI, completions: Completions) -> None:
    app.post("/v1/completions", response_model=None)(completions.answer_text)
    app.post("/v1/chat/completions", response_model=None)(completions.answer_chat)


def _add_models(app: FastAPI, models: Models) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def every(request: Request) -> Response:
        models.check_key(request.headers)
        return json_response({"object": "list", "data": [models.document(created)]})

    @app.get("/v1/models/{name:path}")
    async def one(request: Request, name: str) -> Response:
        models.check_key(request.headers)
        models.check_name(name)
        return json_response(models.document(created))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(HTTPException)
    async def no_such_thing(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        return json_response(invalid(message, None).document(), error.status_code, error.headers)


def _add_state(app: FastAPI, engine: Engine, registry: CollectorRegistry) -> None:
    """GET /health, /ready and /metrics."""

    def described(state: str, status: int) -> Response:
        done, total = engine.progress
        return json_response({"state": state, "programs": {"done": done, "total": total}}, status)

    @app.get("/health")
    async def health() -> Response:
        return described(engine.state, 500 if engine.state == State.BROKEN else 200)

    @app.get("/ready")
    async def ready() -> Response:
        state = "leaving" if app.state.leaving else engine.state
        return described(state, 200 if state == State.SERVING else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    page = importlib.resources.files(__package__).joinpath("page.html").read_bytes()

    @app.get("/")
    async def chat_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)
