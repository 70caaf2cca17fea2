"""Faults: clients leave, models fail, queues are full, the end comes under load. Each a clear answer, nothing lost."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
import httpx
import openai

from tests.serving.llm.fake import SOON_S, FakeEngine
from tests.serving.llm.served import NAME, Served, until

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
LONG = "one two three four five six " * 8


def _all_back(served: Served) -> bool:
    return not served.engine.running and not served.engine.waiting


def test_a_client_that_leaves_in_mid_stream_frees_its_slot() -> None:
    with Served(FakeEngine(LONG, wait_at=3)) as served:
        stream = served.openai.chat.completions.create(**CHAT, stream=True)
        assert "".join(next(stream).choices[0].delta.content or "" for _ in range(4)) == "one"
        stream.close()
        until(lambda: served.engine.accepted[0].cancelled.is_set() and _all_back(served))
        until(lambda: served.count("chat/completions", 499) == 1)
        served.engine.go_on.set()
        assert served.post(prompt="a").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_its_slot(stream: bool) -> None:
    with Served(FakeEngine(LONG, wait_at=0)) as served:
        body = json.dumps({"model": NAME, "prompt": "a", "stream": stream, "n": 2}).encode()
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            until(lambda: len(served.engine.running) == 2)
        until(lambda: all(each.cancelled.is_set() for each in served.engine.accepted) and _all_back(served))
        until(lambda: served.count("completions", 499) == 1)


def test_a_client_that_does_not_read_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaxla.serving.http.sse.MAX_SEND_S", 0.3)
    with Served(FakeEngine("x" * 40_000, max_length=100_000)) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: served.engine.accepted and served.engine.accepted[0].cancelled.is_set() and _all_back(served))
        assert served.post(prompt="a").status_code == 200


def test_a_model_that_fails() -> None:
    with Served(FakeEngine(fail_at=0)) as served:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                served.openai.chat.completions.create(**CHAT, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (500, "model_failed")
            assert "ValueError" in str(caught.value)
            assert "secret" not in str(caught.value)
        served.engine.fail_at = None
        assert served.post(prompt="a").status_code == 200


def test_a_model_that_fails_in_mid_stream() -> None:
    with Served(FakeEngine(fail_at=3)) as served:
        told: list[str] = []
        with pytest.raises(openai.APIError) as caught:
            _read_into(told, served.openai.chat.completions.create(**CHAT, stream=True))
        assert told == ["", "o", "n", "e"]
        assert caught.value.code == "model_failed"
        lines = served.post("chat/completions", **CHAT, stream=True, n=3).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-1] == ""
        until(lambda: _all_back(served))
        served.engine.fail_at = None
        assert served.post(prompt="a").status_code == 200


def _read_into(told: list[str], stream: Any) -> None:
    for part in stream:
        told.append(part.choices[0].delta.content)


def test_deadlines() -> None:
    with Served(FakeEngine(wait_at=2), deadline_s=0.1) as served:
        late = served.post(prompt="a")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert late.headers["x-should-retry"] == "false"
        served.engine.wait_at, served.engine.expire_at = None, 4
        with pytest.raises(openai.APIError, match="not answered within"):
            list(served.openai.completions.create(model=NAME, prompt="a", stream=True, extra_body={"deadline_s": 7}))
        assert served.engine.accepted[-1].deadline_s == 7


def test_a_hundred_at_once_with_a_queue_of_ten() -> None:
    engine = FakeEngine(wait_at=0, slots=2, max_queue=10)
    with Served(engine) as served, ThreadPoolExecutor(100) as pool:
        answers = [pool.submit(served.post, prompt=f"a{index}") for index in range(100)]
        until(lambda: len(engine.running) + len(engine.waiting) == 12 and sum(each.done() for each in answers) == 88)
        engine.go_on.set()
        responses = [answer.result() for answer in answers]
        assert sorted(response.status_code for response in responses) == [200] * 12 + [429] * 88
        refused = next(response for response in responses if response.status_code == 429)
        assert refused.headers["Retry-After"] == "3"
        assert refused.json()["error"]["code"] == "queue_full"
        until(
            lambda: (served.count("completions", 200), served.count("completions", 429)) == (12, 88)
        )  # behind the answer
        until(lambda: _all_back(served))


def test_the_choices_of_a_request_are_accepted_all_or_none() -> None:
    engine = FakeEngine(wait_at=0, slots=1, max_queue=3)
    with Served(engine) as served:
        assert served.post(prompt="a", n=6).status_code == 429
        assert all(each.cancelled.is_set() for each in engine.accepted)
        until(lambda: _all_back(served))
        engine.go_on.set()
        assert served.post(prompt="a", n=2).status_code == 200


def test_openai_s_client_tries_again_when_told() -> None:
    engine = FakeEngine(wait_at=0, slots=1, max_queue=1)
    with Served(engine) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.post, prompt="a")
        until(lambda: engine.running)
        second = pool.submit(served.post, prompt="a")
        until(lambda: engine.waiting)
        patient = served.openai.with_options(max_retries=3)
        third = threading.Timer(0.2, engine.go_on.set)
        third.start()
        assert patient.completions.create(model=NAME, prompt="a").choices[0].text == engine.text
        assert [each.result().status_code for each in (first, second)] == [200, 200]
        assert served.count("completions", 429) >= 1


def test_not_ready_until_warm() -> None:
    engine = FakeEngine()
    engine.starts.clear()
    with Served(engine) as served:
        ready = served.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"state": "starting", "programs": {"done": 0, "total": 4}})
        assert served.http.get("/health").status_code == 200
        early = served.post(prompt="a")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "starting")
        assert int(early.headers["Retry-After"]) >= 1
        engine.starts.set()
        until(lambda: served.http.get("/ready").status_code == 200)
        assert served.post(prompt="a").status_code == 200


def test_an_end_while_warming_up() -> None:
    engine = FakeEngine()
    engine.starts.clear()
    with Served(engine):
        pass
    assert engine.state == "closed"


def test_a_warm_up_that_failed_is_ill_health() -> None:
    with Served() as served:
        served.engine.state = "broken"
        assert [served.http.get(path).status_code for path in ("/health", "/ready")] == [500, 503]
        assert served.post(prompt="a").status_code == 503
        served.engine.state = "serving"


def test_the_end_under_load_loses_nothing() -> None:
    """A stream under way ends as it should, who waits is answered, who comes later is refused."""
    engine = FakeEngine(wait_at=3, slots=2)
    with Served(engine) as served, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(lambda: served.post("chat/completions", **CHAT, stream=True).text) for _ in range(2)]
        waiting = [pool.submit(served.post, prompt="a") for _ in range(4)]
        until(lambda: len(engine.running) == 2 and len(engine.waiting) == 4)
        served.app.state.leaving = True  # what a signal does at once
        assert served.http.get("/ready").json()["state"] == "leaving"
        late = pool.submit(served.post, prompt="late")
        until(lambda: len(engine.waiting) == 5)
        served.stop()
        until(lambda: engine.state == "draining")
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{served.url}/v1/completions", json={"model": NAME, "prompt": "a"})
        engine.go_on.set()
        for text in [each.result() for each in streams]:
            assert text.endswith("data: [DONE]\n\n")
        assert [each.result().status_code for each in (*waiting, late)] == [200] * 5


def test_what_outlasts_the_drain_is_told_so() -> None:
    engine = FakeEngine(wait_at=3, slots=1)
    with Served(engine, drain_s=0.3) as served, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(lambda: served.post("chat/completions", **CHAT, stream=True).text)
        until(lambda: engine.running and engine.reached.is_set())
        waiting = pool.submit(served.post, prompt="a")
        until(lambda: engine.waiting)
        began = time.monotonic()
        served.stop()
        lines = stream.result().split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "not_serving"
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_serving")
        served.thread.join(SOON_S)
        assert time.monotonic() - began < 5


def test_the_end_does_not_wait_for_a_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with Served() as served:
        clients = [socket.create_connection(("127.0.0.1", served.port), 20) for _ in range(3)]
        for client, data in zip(clients, (head, b"POST /v1", b""), strict=True):
            client.sendall(data)
        until(lambda: len(served.server.server_state.tasks) == 1)
        began = time.monotonic()
        served.stop()
        assert clients[0].recv(100).startswith(b"HTTP/1.1 503")
        served.thread.join(SOON_S)
        assert time.monotonic() - began < 5
        for client in clients:
            client.close()


def test_nothing_is_kept_of_what_was_answered() -> None:
    with Served() as served:

        async def ask(client: httpx.AsyncClient, index: int) -> None:
            fields = CHAT | {"stream": index % 2 == 0, "n": 2}
            if index % 3:
                await client.post("/v1/chat/completions", json=fields)
                return
            async with client.stream("POST", "/v1/chat/completions", json=fields) as response:
                async for _ in response.aiter_bytes():
                    break

        async def ask_all() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=SOON_S) as client:
                for _ in range(10):
                    await asyncio.gather(*(ask(client, index) for index in range(5)))

        served.engine.max_queue = 100
        asyncio.run(ask_all())
        until(lambda: _all_back(served) and served.registry.get_sample_value("http_open_requests") == 0)
        kept = [weakref.ref(each) for each in served.engine.accepted]
        assert len(kept) == 100
        served.engine.accepted.clear()

        def is_gone() -> bool:
            gc.collect()
            return not any(each() is not None for each in kept)

        until(is_gone)


def test_metrics() -> None:
    with Served() as served:
        served.post(prompt="a")
        served.post(prompt="a", n=0)
        text = served.http.get("/metrics").text
        assert 'http_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert 'http_requests_total{path="/v1/completions",status="400"} 1.0' in text
        assert 'http_first_byte_seconds_count{path="/v1/completions"} 1.0' in text


def test_the_page_is_all_there_is_of_it() -> None:
    with Served() as served:
        page = served.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        assert "<textarea" in page.text
        assert not [mark for mark in ("http://", "https://", "//cdn", "src=", "innerHTML") if mark in page.text]
