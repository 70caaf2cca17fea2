"""The processes that compute together: how they meet, how one waits for the others, and what is told when one is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from dynaxla.errors import DistributedError, ExecutionError
from dynaxla.isolation.once import once
from dynaxla.runtime import process_clients, xla
from dynaxla.runtime.client import Buffer

LOST_AFTER_S = 12.0
"""A process of which nothing was heard for so long is lost."""

VERDICT_S = 2 * LOST_AFTER_S
"""After a failed run, so long is waited for the reason: gloo knows that a connection ended, the heartbeat whose."""

_LOOK_S = 0.2
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 2e-3


class SharedStore(Protocol):
    """What all processes read and write."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class _AnsweringStore:
    """A store of which each request has an answer in time: TCPStore waits for ever for a host that vanished.

    Args:
        store: what the requests go to.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._ask(partial(self._store.set, key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(partial(self._store.get, key)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(partial(self._store.check, keys)))

    def _ask(self, request: Callable[[], Any]) -> Any:
        """
        Raises:
            RuntimeError: the store is gone, or does not answer: its server needs no lock of the interpreter, so that a busy
                process answers too.
        """
        answer: Future[Any] = Future()
        threading.Thread(target=_answer, args=(answer, request), daemon=True).start()
        try:
            return answer.result(LOST_AFTER_S)
        except TimeoutError:
            raise RuntimeError(f"no answer for {LOST_AFTER_S:g} s") from None


def _answer(answer: Future[Any], request: Callable[[], Any]) -> None:
    try:
        answer.set_result(request())
    except RuntimeError as error:  # of c10d
        answer.set_exception(error)


class Rendezvous(Protocol):
    """How processes agree on an address."""

    def agree(self, address: str | None) -> str:
        """The address that one of the processes gives; waits for it in those that give None."""


@dataclass(slots=True, eq=False)
class ProcessSet:
    """This process and those that it computes with.

    Attributes:
        rank: of this process, from 0.
        size: the number of processes.
        coordination: the process's client of JAX's coordination service.
        service: the service, where this process runs it.
        store: what the processes tell each other.
        host: where the others reach this process.
        timeout_s: after so long without the others, a process raises.
        failure: why nothing can be computed together any more; None as long as it can.
        watch: the `peer_watch.PeerWatch` that compares what the processes do.
        find_reason: looks for a process that has ended, and says so by `fail`.
    """

    rank: int
    size: int
    coordination: Any
    service: Any
    store: SharedStore
    host: str
    timeout_s: float
    failure: DistributedError | None = None
    find_reason: Callable[[], None] = lambda: None
    watch: Any = None
    _told: threading.Event = field(default_factory=threading.Event)

    @property
    def place(self) -> tuple[Any, int, int]:
        """What a PJRT client is made with that joins those of the others: the coordination, the rank and the size."""
        return self.coordination, self.rank, self.size

    def fail(self, error: DistributedError) -> None:
        """From now on, what waits for other processes raises an error; the first one stays."""
        if self.failure is None:
            self.failure = error
            self._told.set()

    def check(self) -> None:
        """
        Raises:
            DistributedError: a process was lost, or computes something else.
        """
        if self.failure is not None:
            raise self.failure

    def disconnect(self) -> None:
        """Leaves the coordination service, and ends it where this process has it: the others have left it.

        Raises:
            RuntimeError: it is gone.
        """
        self.coordination.shutdown()
        if self.service is not None:
            self.service.shutdown()

    def wait_for(self, buffer: Buffer, timeout_s: float | None = None) -> None:
        """Waits for the run that computes a buffer, for which other processes may be needed.

        Raises:
            DistributedError: a process was lost or computes something else, or the time is over.
            ExecutionError: the run failed.
        """
        started, pause = time.monotonic(), _SHORTEST_WAIT_S
        while not (buffer.is_deleted() or buffer.is_ready()):
            self.check()
            if timeout_s is not None and time.monotonic() - started > timeout_s:
                raise DistributedError(
                    f"the other processes did not come within {timeout_s:g} s", "is a process waiting elsewhere?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits for what another process does.

        Raises:
            DistributedError: a process was lost.
        """
        while not is_so():
            self.check()
            time.sleep(_LONGEST_WAIT_S)

    def explain(self, error: Exception) -> DistributedError | ExecutionError:
        """What to raise for a run that failed: why the processes cannot compute together, if that is soon known."""
        if "gloo" not in str(error).lower() and "connection" not in str(error).lower():
            return ExecutionError(str(error))
        until = time.monotonic() + VERDICT_S
        while self.failure is None and time.monotonic() < until:
            self.find_reason()
            self._told.wait(_LOOK_S)
        return self.failure or DistributedError(f"a process left a collective: {error}", "look at its own output")


@dataclass(slots=True)
class _Joined:
    processes: ProcessSet | None = None


@once
def _joined() -> _Joined:
    return _Joined()


def joined_processes() -> ProcessSet | None:
    """The processes that this one has met; None if it has met none."""
    return _joined().processes


def meet_processes(rank: int, size: int, own: str, address: str | Rendezvous, timeout_s: float) -> ProcessSet:
    """Meets the other processes at a coordination service that rank 0 starts.

    Args:
        own: where the others reach this process's host.
        address: of the service, "host:port", if all processes know it; else how they tell each other.
        timeout_s: so long the others are waited for, now and by every program.

    Raises:
        DistributedError: the service could not start, or was not reached in time, or the processes have met before.
    """
    if (known := joined_processes()) is not None:
        raise DistributedError(
            f"this process is number {known.rank} of {known.size} already", "processes meet once; start all anew"
        )
    error = xla.load().Error
    try:
        service = None
        if not isinstance(address, str):
            address = address.agree(f"{own}:{_free_port()}" if rank == 0 else None)
        if rank == 0:
            service = process_clients.start_coordinator(int(address.rpartition(":")[2]), size)
        coordination = process_clients.connect_coordinator(address, rank, max(1, int(timeout_s)))
        store = _meet_in_store(coordination, rank, address.rpartition(":")[0].strip("[]"), timeout_s)
    except error as refusal:
        raise DistributedError(
            f"the processes did not meet: {refusal}", "is rank 0's host reached by the others?"
        ) from refusal
    made = _joined().processes = ProcessSet(rank, size, coordination, service, store, own, timeout_s)
    return made


def _meet_in_store(coordination: Any, rank: int, host: str, timeout_s: float) -> SharedStore:
    """The store of the processes, which rank 0 has: its port is told at the coordination service.

    It is not that of the service: what waits for an answer of the service waits for ever where that ended.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, key = timedelta(seconds=timeout_s), "dynaxla/store"
    if rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
        coordination.key_value_set(key, str(store.port))
        return store
    port = int(coordination.blocking_key_value_get(key, max(1, int(1e3 * timeout_s))))
    return _AnsweringStore(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))


def find_own_address(known: str | None) -> str:
    """Where other processes reach this host: the address from which it reaches a host that all of them know.

    Args:
        known: that host; None: there is none, and the host's own name is looked up.
    """
    try:
        if known is None:
            return socket.gethostbyname(socket.gethostname())
        kind, _, _, _, address = socket.getaddrinfo(known, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _free_port() -> int:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
