"""The example's HTTP face with a model that is a function: which request gets which status."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
import httpx
import numpy as np
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from dynaxla.serving import Server, Settings
from dynaxla.serving.prometheus import PrometheusObserver

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from embedding_api import MOST_BODY_BYTES, MOST_CHARACTERS, MOST_TEXTS, create_app

SETTINGS = Settings(max_size=16, max_batch=4, max_wait_s=0.001, max_queue=8)
SOON_S = 20.0


def _tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class Model:
    """Sums and counts tokens. Fails on a word of 13 letters; waits, where one has 7, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, batch: Sequence[list[int]]) -> list[np.ndarray]:
        if any(13 in tokens for tokens in batch):
            raise RuntimeError("a secret")
        if any(7 in tokens for tokens in batch):
            self.reached.set()
            assert self.go_on.wait(SOON_S)
        return [np.array([sum(tokens), len(tokens)], np.float32) for tokens in batch]


class Served:
    """An application that runs, without a network."""

    def __init__(self, prepare: Any = lambda: None, **options: Any) -> None:
        self.model, self.registry = Model(), CollectorRegistry()
        observer = PrometheusObserver(self.registry)
        self.server: Any = Server(self.model, len, SETTINGS, observer=observer, prepare=prepare)
        self.app: FastAPI = create_app(self.server, _tokenize, self.registry, **options)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with (
            self.app.router.lifespan_context(self.app),
            httpx.AsyncClient(transport=transport, base_url="http://served") as client,
        ):
            try:
                yield client
            finally:
                self.model.go_on.set()

    async def is_ready(self) -> None:
        await asyncio.to_thread(self.server.wait_until_ready, SOON_S)

    def count(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("serving_requests_total", {"outcome": outcome})


async def _post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/embed", json=body)


def test_one_text_and_several() -> None:
    async def ask() -> None:
        async with served.client() as client:
            await served.is_ready()
            one = await _post(client, text="ab cde")
            assert (one.status_code, one.json()) == (200, {"embedding": [5.0, 2.0], "tokens": 2})
            several = await _post(client, texts=["a", "a b c d e"], encoding="base64")
            vectors = [np.frombuffer(base64.b64decode(v), "<f4").tolist() for v in several.json()["embeddings"]]
            assert vectors == [[1.0, 1.0], [5.0, 5.0]]

    served = Served()
    asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 422, "give"),
        ({"text": "a", "texts": ["a"]}, 422, "give"),
        ({"text": 5}, 422, "string"),
        ({"text": "a", "txet": "b"}, 422, "txet"),
        ({"text": "a", "deadline_s": -1}, 422, "deadline_s"),
        ({"text": "a", "encoding": "xml"}, 422, "base64"),
        ({"text": ""}, 400, "text 0 is empty"),
        ({"texts": []}, 400, "no text"),
        ({"texts": ["a", " \n"]}, 400, "text 1 is empty"),
        ({"text": "a " * 17}, 413, "size 17 is above 16"),
        ({"texts": ["a"] * (MOST_TEXTS + 1)}, 413, "65"),
        ({"text": "a" * (MOST_CHARACTERS + 1)}, 413, "20001"),
        ({"text": "a" * MOST_BODY_BYTES}, 413, str(MOST_BODY_BYTES)),
        ({"texts": ["a"] * 9}, 400, "never fit"),
        ({"text": "unimaginables"}, 500, "RuntimeError"),
    ],
)
def test_a_bad_request_gets_a_clear_answer(body: dict[str, Any], status: int, named: str) -> None:
    async def ask() -> None:
        async with served.client() as client:
            await served.is_ready()
            response = await _post(client, **body)
            assert response.status_code == status
            assert named in response.text
            assert "secret" not in response.text
            assert (await _post(client, text="fine")).status_code == 200

    served = Served()
    asyncio.run(ask())


def test_a_body_that_is_no_json_and_one_of_unknown_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"text": "a"}'

    async def ask() -> None:
        async with served.client() as client:
            await served.is_ready()
            assert (await client.post("/embed", content=b"{", headers=JSON)).status_code == 422
            assert (await client.post("/embed", content=chunks(), headers=JSON)).status_code == 411

    served = Served()
    asyncio.run(ask())


JSON = {"Content-Type": "application/json"}


def test_health_and_readiness_from_start_to_end() -> None:
    prepared = threading.Event()

    async def states(client: httpx.AsyncClient) -> tuple[int, int, int]:
        paths = [await client.get("/health"), await client.get("/ready"), await _post(client, text="a")]
        return tuple(response.status_code for response in paths)  # type: ignore[return-value]

    async def ask() -> None:
        async with served.client() as client:
            assert await states(client) == (200, 503, 503)
            prepared.set()
            await served.is_ready()
            assert await states(client) == (200, 200, 200)
            served.app.state.leaving = True
            assert await states(client) == (200, 503, 200)
            await asyncio.to_thread(served.server.drain)
            assert await states(client) == (200, 503, 503)

    served = Served(prepare=lambda: prepared.wait(SOON_S))
    asyncio.run(ask())


def test_a_failed_warm_up_is_ill_health() -> None:
    def prepare() -> None:
        raise RuntimeError

    async def ask() -> None:
        async with served.client() as client:
            while (response := await client.get("/health")).json()["state"] == "starting":
                await asyncio.sleep(0.01)
            assert response.status_code == 500

    served = Served(prepare=prepare)
    asyncio.run(ask())


def test_a_full_queue_and_a_missed_deadline() -> None:
    async def ask() -> None:
        async with served.client() as client:
            await served.is_ready()
            held = asyncio.create_task(_post(client, text="waiting"))
            assert await asyncio.to_thread(served.model.reached.wait, SOON_S)
            late = await _post(client, text="a", deadline_s=0.02)
            assert (late.status_code, late.json()["error"]["id"]) == (504, "DX730")
            queued = asyncio.create_task(_post(client, texts=["a"] * 8))
            while served.server.queue_depth < 8:
                await asyncio.sleep(0.001)
            full = await _post(client, text="a")
            assert full.status_code == 429
            assert int(full.headers["Retry-After"]) >= 1
            served.model.go_on.set()
            assert [response.status_code for response in await asyncio.gather(held, queued)] == [200, 200]
            assert 'serving_requests_total{outcome="queue_full"} 1.0' in (await client.get("/metrics")).text

    served = Served()
    asyncio.run(ask())


def test_a_client_that_hangs_up_frees_its_place() -> None:
    async def ask() -> None:
        async with served.client() as client:
            await served.is_ready()
            held = asyncio.create_task(_post(client, text="waiting"))
            assert await asyncio.to_thread(served.model.reached.wait, SOON_S)
            hang_up = asyncio.Event()
            gone = asyncio.create_task(_call(served.app, {"text": "a b"}, hang_up))
            while not served.server.queue_depth:
                await asyncio.sleep(0.001)
            hang_up.set()
            assert await gone == 499
            assert (served.server.queue_depth, served.count("cancelled")) == (0, 1)
            served.model.go_on.set()
            assert (await held).status_code == 200

    served = Served()
    asyncio.run(ask())


async def _call(app: FastAPI, body: dict[str, Any], hang_up: asyncio.Event) -> int:
    """The status of an answer that a client does not wait for."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/embed",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return statuses[0]
