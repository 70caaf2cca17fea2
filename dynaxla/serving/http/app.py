"""The application: OpenAI's endpoints, health, metrics and the chat page around an engine."""

from __future__ import annotations

import asyncio
import importlib.resources
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.http.endpoints import CompletionEndpoints, ServedModel
from dynaxla.serving.http.http_errors import ApiError, invalid, json_response
from dynaxla.serving.http.middleware import MAX_BODY_BYTES, BodyReader, RequestCounter
from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.requests import Engine

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
    most_body_bytes: int = MAX_BODY_BYTES,
    watch: Callable[[Engine], None] | None = None,
) -> FastAPI:
    """The application; starts the engine with its own start, and drains it with its end.

    Args:
        engine: not yet started.
        tokenizer: of transformers, a fast one.
        name: of the model in requests.
        registry: what /metrics shows.
        api_key: bearer token that /v1 requires; None: none.
        deadline_s: deadline of requests that set none, in seconds.
        drain_s: most seconds to finish accepted requests at shutdown.
        most_body_bytes: size of the largest body that is accepted.
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
    app.state.leaving = False  # set at shutdown, so that load balancers stop sending requests
    app.state.closing = asyncio.Event()  # set when the port closes: bodies are not awaited any more
    app.state.hurry = asyncio.Event()  # set when answers are not awaited any more
    app.add_middleware(BodyReader, closing=app.state.closing, most_bytes=most_body_bytes)
    app.add_middleware(RequestCounter, registry=registry)
    _add_errors(app)
    _add_state(app, engine, registry)
    _add_page(app)
    _add_models(app, ServedModel(name, api_key))
    _add_completions(app, CompletionEndpoints(engine, Text(tokenizer), ServedModel(name, api_key), deadline_s))
    return app


async def _drain_when(event: asyncio.Event, engine: Engine, drain_s: float) -> None:
    """Drains once the event is set, while connections are answered: requests that outlast the drain get an error."""
    await event.wait()
    await asyncio.to_thread(engine.drain, drain_s)


def _add_completions(app: FastAPI, completions: CompletionEndpoints) -> None:
    app.post("/v1/completions", response_model=None)(completions.create_completion)
    app.post("/v1/chat/completions", response_model=None)(completions.create_chat_completion)


def _add_models(app: FastAPI, models: ServedModel) -> None:
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
    @app.exception_handler(ApiError)
    async def refused(request: Request, refusal: ApiError) -> Response:
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

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return described(engine.state, 500 if engine.state == State.BROKEN else 200)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        state = "leaving" if app.state.leaving else engine.state
        return described(state, 200 if state == State.SERVING else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    page = importlib.resources.files(__package__).joinpath("page.html").read_bytes()

    @app.api_route("/", methods=["GET", "HEAD"])
    async def chat_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)
