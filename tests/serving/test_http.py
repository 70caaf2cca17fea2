"""The example's HTTP face over a real connection: what is malformed is refused, the connection is kept, and nothing waits."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
import uvicorn

from tests.serving.test_api import JSON, MOST_BODY_BYTES, Served  # which finds the example

from embedding_api import LingeringServer  # isort: skip

GOOD = b'{"text": "ab cde"}'
MALFORMED = [
    b'{"text": "\\ud800"}',
    b'{"texts": ["a", "\\udfff b"]}',
    b'{"text": "a", "\\ud800": 1}',
    b'{"text": "a", "encoding": "\\ud800"}',
    b'{"text": "a", "deadline_s": NaN}',
    b'{"text": "a", "deadline_s": Infinity}',
    b'{"text": "a", "deadline_s": -Infinity}',
    b'{"text": "a", "deadline_s": 1e999}',
    b'{"text": "a", "deadline_s": "NaN"}',
    b'{"text": "a", "deadline_s": ' + b"9" * 400 + b"}",
    b'{"text": "a", "deadline_s": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"text": ' * 20_000 + b"1" + b"}" * 20_000,
    b'{"text": "\xff"}',
    b"\xff\xfe\x00",
    b"",
    b"null",
    b"NaN",
    b'"\\ud800"',
]


class Running:
    """The example's server on a port of its own, in a thread."""

    def __init__(self) -> None:
        self.served = Served()
        config = uvicorn.Config(self.served.app, port=0, log_config=None, timeout_graceful_shutdown=30)
        self.server = LingeringServer(config, self.served.app, 0.0)
        self.thread = threading.Thread(target=asyncio.run, args=(self.server.serve(),))

    def start(self) -> None:
        self.thread.start()
        self.served.server.wait_until_ready(20)
        while not self.server.started:
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    made.start()
    yield made
    made.stop()
    assert not made.thread.is_alive()


class Kept:
    """A client that says whether its connection was kept."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self._http.connect()
        self._mine = self._http.sock.getsockname()

    def post(self, body: bytes, headers: dict[str, str] = JSON) -> int:
        self._http.request("POST", "/embed", body, headers)
        response = self._http.getresponse()
        answer = response.read()
        assert answer.isascii()
        assert self._http.sock is not None, "the server closes the connection"
        assert self._http.sock.getsockname() == self._mine
        return response.status


def test_what_is_malformed_is_refused_and_the_connection_kept(running: Running) -> None:
    client = Kept(running.port)
    for body in MALFORMED:
        assert client.post(body) == 422, body[:50]
        assert client.post(GOOD) == 200, body[:50]
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.post(GOOD, {"Content-Type": kind}) == 422
    assert client.post(GOOD) == 200
    assert running.served.count("rejected") == len(MALFORMED) + 3
    assert running.served.count("ok") == len(MALFORMED) + 1


def test_other_refusals_are_counted_and_keep_the_connection(running: Running) -> None:
    client = Kept(running.port)
    assert client.post(b'{"text": "%s"}' % (b"a" * MOST_BODY_BYTES)) == 413
    assert client.post(b'{"text": " "}') == 400
    assert client.post(b'{"texts": []}') == 400
    assert client.post(b'{"text": "%s"}' % (b"a " * 17)) == 413
    assert running.served.count("rejected") == 4
    assert client.post(b'{"text": "unimaginables"}') == 500
    assert running.served.count("failed") == 1
    assert client.post(GOOD) == 200


def test_the_end_does_not_wait_for_a_body(running: Running) -> None:
    """Half a body, half a head, and nothing at all; what was accepted is answered."""
    sent = [
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"POST /em",
        b"",
    ]
    clients = [socket.create_connection(("127.0.0.1", running.port), 20) for _ in sent]
    for client, data in zip(clients, sent, strict=True):
        client.sendall(data)
    accepted = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    accepted.request("POST", "/embed", b'{"text": "waiting"}', JSON)
    assert running.served.model.reached.wait(20)
    running.server.should_exit = True
    assert clients[0].recv(100).startswith(b"HTTP/1.1 503")
    running.served.model.go_on.set()
    assert accepted.getresponse().status == 200
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 5
    assert not running.thread.is_alive()
    for client in clients:
        client.close()
