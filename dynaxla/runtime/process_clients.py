"""PJRT clients of several processes, which meet at JAX's coordination service: jaxlib's part of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from dynaxla.runtime.xla import load

_CHUNK = 1 << 16
_NEVER_S, _TOGETHER_S = 24 * 60 * 60, 20


def start_coordinator(port: int, processes: int) -> Any:
    """Starts JAX's coordination service, which several processes meet at. It ends when it is dropped.

    Raises:
        Jaxlib.Error: the port is taken.
    """
    return load().jax.get_distributed_runtime_service(
        f"[::]:{port}", processes, heartbeat_timeout=_NEVER_S, shutdown_timeout=_TOGETHER_S
    )


def connect_coordinator(address: str, rank: int, timeout_s: int) -> Any:
    """Connects to the coordination service that one of the processes started.

    The service is not asked which processes are alive: where one is not, JAX ends all others.

    Args:
        address: "host:port".

    Raises:
        Jaxlib.Error: the service was not reached in time.
    """
    client = load().jax.get_distributed_runtime_client(
        address if rank == 0 else _Relay(address).address,  # the service ends with process 0
        rank,
        init_timeout=timeout_s,
        shutdown_timeout=_TOGETHER_S,
        heartbeat_timeout=_NEVER_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


class _Relay:
    """The way of a process to the coordination service that another process has: bytes are relayed within this process.

    Where the service ends without a word, JAX's client ends its process: its poll for errors fails, and its binding of a
    callback in place of that throws (jaxlib 0.10.2: std::bad_cast of absl::Status). The relay keeps the client's connection
    open: the client waits, and the store of the processes, whose connections end too, says who is lost.

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


def _start(target: Callable[..., None], *args: socket.socket) -> None:
    threading.Thread(target=target, args=args, name="dynaxla coordination", daemon=True).start()


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


def joined_cpu(coordination: Any, rank: int, processes: int, host: str | None, devices: int) -> Any:
    """A CPU client that knows the devices of other processes; its collectives are gloo's, over TCP.

    It runs programs in threads of its own, so that a caller waits for other processes only where it reads.

    Args:
        coordination: the process's client of the coordination service.
        host: where the others reach this process; None: its host's name.
        devices: as how many devices the processor is shown.
    """
    bindings = load()
    collectives = bindings.jax.make_gloo_tcp_collectives(distributed_client=coordination, hostname=host)
    return bindings.xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=coordination,
        node_id=rank,
        num_nodes=processes,
        collectives=collectives,
        num_devices=devices,
    )
