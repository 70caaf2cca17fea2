"""The coroutine's side: deadlines to the moment, and cancellation that frees the place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from dynaxla.errors import DeadlineExceeded, RequestTooLarge
from dynaxla.serving import Server, Settings

SETTINGS = Settings(max_size=64, max_batch=4, max_wait_s=0.001)
SOON_S = 20.0


def _upper(texts: Sequence[str]) -> list[str]:
    return [text.upper() for text in texts]


def test_results_come_in_order() -> None:
    with Server(_upper, len, SETTINGS) as server:
        assert asyncio.run(server.answer_all(["b" * 30, "a", "c" * 30])) == ["B" * 30, "A", "C" * 30]


def test_an_error_is_raised_where_it_is_awaited() -> None:
    def run(texts: Sequence[str]) -> list[str]:
        if "bad" in texts:
            raise KeyError("bad")
        return _upper(texts)

    async def both() -> None:
        good, bad = await asyncio.gather(
            server.answer_all(["good"]), server.answer_all(["fine", "bad"]), return_exceptions=True
        )
        assert good == ["GOOD"]
        assert isinstance(bad, KeyError)
        with pytest.raises(RequestTooLarge):
            await server.answer_all(["x" * 65])

    with Server(run, len, SETTINGS) as server:
        asyncio.run(both())


class Held:
    """A model that holds every batch until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.ran: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[str]:
        self.ran += texts
        self.reached.set()
        assert self.go_on.wait(SOON_S)
        return _upper(texts)


def test_the_deadline_is_kept_while_a_batch_runs() -> None:
    held = Held()

    async def ask() -> None:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await server.answer_all(["slow"], deadline_s=0.05)
        assert not held.go_on.is_set()

    with Server(held, len, SETTINGS) as server:
        asyncio.run(ask())
        held.go_on.set()


def test_a_cancelled_task_takes_its_requests_out() -> None:
    held = Held()

    async def ask() -> None:
        running = asyncio.create_task(server.answer_all(["running"]))
        assert await asyncio.to_thread(held.reached.wait, SOON_S)
        waiting = asyncio.create_task(server.answer_all(["one", "two"]))
        await asyncio.sleep(0)
        assert server.queue_depth == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert server.queue_depth == 0
        held.go_on.set()
        assert await running == ["RUNNING"]

    with Server(held, len, SETTINGS) as server:
        asyncio.run(ask())
    assert held.ran == ["running"]
