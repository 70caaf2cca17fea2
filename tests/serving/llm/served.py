"""A server on a port of its own, in a thread, around an engine that does as it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn
from openai import OpenAI
from prometheus_client import CollectorRegistry

from dynaxla.serving.http import LingeringServer, create_app
from tests.serving.llm.fake import SOON_S, FakeEngine
from tests.serving.llm.tiny import make_tokenizer

NAME = "tiny/model"


class Served:
    """Runs between `with` and its end.

    Args:
        engine: served.
        tokenizer: of it; None: the tiny one.
        linger_s: as in LingeringServer.
        options: of `create_app`.
    """

    def __init__(self, engine: Any = None, *, tokenizer: Any = None, linger_s: float = 0.0, **options: Any) -> None:
        self.tokenizer = tokenizer or make_tokenizer()
        self.engine = engine or FakeEngine()
        if isinstance(self.engine, FakeEngine):
            self.engine.tokens = [self.tokenizer.encode(chr(code))[0] for code in range(128)]
        self.registry = CollectorRegistry()
        self.app = create_app(self.engine, self.tokenizer, NAME, self.registry, **{"drain_s": 5.0} | options)
        config = uvicorn.Config(self.app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=30)
        self.server = LingeringServer(config, self.app, linger_s)
        self.thread = threading.Thread(target=asyncio.run, args=(self.server.serve(),))

    def __enter__(self) -> Self:
        self.thread.start()
        end = time.monotonic() + 6 * SOON_S
        while not self.server.started or (self.engine.state == "starting" and self._is_to_start()):
            assert self.thread.is_alive()
            assert time.monotonic() < end
            time.sleep(0.005)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=SOON_S)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SOON_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(self.engine, FakeEngine):
            self.engine.go_on.set()
        self.http.close()
        self.openai.close()
        self.stop()
        self.thread.join(SOON_S)
        assert not self.thread.is_alive()

    def stop(self) -> None:
        """What a signal does after the lingering."""
        self.server.should_exit = True

    def post(self, path: str = "completions", **fields: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json={"model": NAME} | fields)

    def count(self, path: str, status: int) -> float:
        labels = {"path": f"/v1/{path}", "status": str(status)}
        return self.registry.get_sample_value("http_requests_total", labels) or 0.0

    def _is_to_start(self) -> bool:
        return not isinstance(self.engine, FakeEngine) or self.engine.starts.is_set()


def until(true: Any) -> None:
    """Waits for a condition; fails if it does not come."""
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)
