"""The way of a process to JAX's coordination service, which another process has: a relay of bytes within this process.

Where the service ends without a word, JAX's client ends its process: its poll for errors fails, and its binding of a callback
in place of that throws (jaxlib 0.10.2: std::bad_cast of absl::Status). The relay keeps the client's connection open: the client
waits, and the store of the processes, whose connections end too, says who is lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK = 1 << 16


class CoordinationLink:
    """Relays connections that come to a port of this host.

    Args:
        address: of the service, "host:port".

    Attributes:
        address: where this process reaches the service instead.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._service = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            try:
                there = socket.create_connection(self._service)
            except OSError:
                here.close()  # the service is not there yet: the client tries again
                continue
            for each in (here, there):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(_pump, there, here)
            _start(_send, here, there)


def _start(target: object, *args: socket.socket) -> None:
    threading.Thread(target=target, args=args, name="dynaxla coordination", daemon=True).start()  # type: ignore[arg-type]


def _send(here: socket.socket, there: socket.socket) -> None:
    """What the client says; at its end the connection ends."""
    _pump(here, there)
    for each in (there, here):
        each.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Hands bytes on until one side ends, and closes nothing."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
