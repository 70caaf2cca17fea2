"""Runs native compilers in child processes: an abort, a hang or memory exhaustion ends the child, not the user's process."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.options import Limits

logger = logging.getLogger("dynaxla")

_STDERR_TAIL_BYTES = 4000
_START_S = 120.0  # it imports a compiler, perhaps on a busy machine
_LOOK_S = 0.2  # how often it is asked whether an answer is still wanted
_ALIVE_S = 1.0  # how often a child looks whether its parent is there
_OUT_OF_MEMORY_MARKS = (
    "bad_alloc",
    "out of memory",
    "MemoryError",
    "Cannot allocate memory",
    "failed to map segment",  # the dynamic linker
    "Memory allocation still failed",  # OpenBLAS
    "LLVM ERROR: Unable to allocate",
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""No compiler sends these itself: the system, short of memory, or a user ended the child. Its request is not to blame."""


class ChildError(Exception):
    """The child did not answer."""


class ChildDied(ChildError):
    def __init__(self, exit_status: int, stderr_tail: str) -> None:
        super().__init__(f"exit status {exit_status}: {stderr_tail}")
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail


class ChildUnavailable(ChildError):
    """There is no child to answer, of which no request is the cause.

    Attributes:
        why: what became of the child, after "the process".
        hint: what to do.
    """

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


class _ChildEnded(ChildUnavailable):
    """The child was ended from outside: another one may answer."""


class ChildTookTooLong(ChildError):
    pass


class ChildOutOfMemory(ChildError):
    pass


class ChildAbandoned(ChildError):
    """The answer is no longer needed."""


@dataclass(slots=True)
class _Child:
    """Attributes:
    ready: whether it has said that it takes requests.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    owner_pid: int
    ready: bool = False

    def stop(self) -> None:
        """Ends the child and waits for its end. In a forked copy of the parent it only closes the connection."""
        self.connection.close()
        if os.getpid() == self.owner_pid:
            self.process.kill()
            self.process.wait()
        self.stderr.close()


class ChildProcess:
    """One child process that answers requests one at a time, restarted after every failure. Safe from several threads.

    Args:
        module: run as `python -m MODULE FD`; it calls `serve`.
        inject_faults: lets tests make the child fail.
    """

    def __init__(self, module: str, *, inject_faults: bool = False) -> None:
        self._command = [sys.executable, "-m", module]
        self._faults = ["--inject-faults"] if inject_faults else []
        self._child: _Child | None = None
        self._lock = new_lock()
        notify_after_fork(self)

    @property
    def pid(self) -> int | None:
        """The child's process id; None while no child runs."""
        return None if self._child is None else self._child.process.pid

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._lock.locked()

    def start(self) -> None:
        """Starts the child without waiting for it, so that it is ready sooner. Where that fails, a request will say so."""
        with self._lock, suppress(ChildUnavailable):
            self._ready_child()

    def ask(self, request: object, limits: Limits, abandoned: Callable[[], bool] | None = None) -> Any:
        """The child's answer to a request; both are pickled.

        Args:
            abandoned: polled for whether the answer is no longer needed.

        Raises:
            ChildDied, ChildTookTooLong, ChildOutOfMemory: there is no answer, and the next request gets a new child.
            ChildAbandoned: likewise, because the answer is no longer needed.
            ChildUnavailable: no child can be started, or two were ended from outside.
        """
        with self._lock:
            try:
                return self._ask(request, limits, abandoned)
            except BaseException:  # a KeyboardInterrupt too leaves a reply under way that nobody will read
                self._discard()
                raise

    def close(self) -> None:
        """Ends the child if it runs."""
        with self._lock:
            self._discard()

    def _ask(self, request: object, limits: Limits, abandoned: Callable[[], bool] | None) -> Any:
        try:
            return _ask(self._ready_child(), request, limits, abandoned)
        except _ChildEnded as ended:
            logger.warning("a compiling process %s; its request is asked again", ended.why)
        except ChildDied as error:
            if error.exit_status != 0:  # else it was idle for too long, and ended before it saw the request
                raise
        self._discard()
        return _ask(self._ready_child(), request, limits, abandoned)

    def _ready_child(self) -> _Child:
        child = self._child
        if child is not None and child.process.poll() is not None:
            self._discard()
        if self._child is None:
            self._child = self._start()
            weakref.finalize(self, self._child.stop)
        return self._child

    def _start(self) -> _Child:
        try:
            return self._spawn()
        except OSError as error:
            hint = "this user or container may have no more processes or open files, or there is no place for temporary ones"
            raise ChildUnavailable(f"cannot be started: {error}", hint) from error

    def _spawn(self) -> _Child:
        ours, theirs = Pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the child owns it as long as it lives)
        process = subprocess.Popen(
            [*self._command, str(theirs.fileno()), *self._faults],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            process_group=0,  # Ctrl-C is for the parent; in a session of its own its niceness would say nothing here
        )
        theirs.close()
        return _Child(process, ours, stderr, os.getpid())

    def _discard(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def after_fork(self) -> None:
        self._discard()  # the child is the parent's: here, only what is open to it is closed


def serve(arguments: list[str], answer: Callable[[Any], object], idle_s: float | None = None) -> None:
    """The child's side: answers requests until the parent closes the connection, or sends none for `idle_s` seconds.

    With `--inject-faults` a request "fault:KIND" makes the child fail in that way, for tests of the parent.
    """
    connection = Connection(int(arguments[0]))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    inject = "--inject-faults" in arguments
    _be_ended_first()
    mapped = _mapped_bytes()
    connection.send(None)  # it has started
    while connection.poll(idle_s):
        try:
            request, memory_bytes = connection.recv()
        except EOFError:
            return
        _limit_memory(mapped + memory_bytes)
        if inject:
            _fail(_fault(request))
        connection.send(answer(request))


def _ask(child: _Child, request: object, limits: Limits, abandoned: Callable[[], bool] | None) -> object:
    said = os.fstat(child.stderr.fileno()).st_size if child.ready else 0
    try:
        if not child.ready:
            _await_start(child, abandoned)
        child.connection.send((request, limits.memory_bytes))
        if not _answers(child, limits.seconds, abandoned):
            raise ChildTookTooLong
        return child.connection.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = child.process.wait()
        tail = _tail(child.stderr, said)
    if -status in _FROM_OUTSIDE:
        hint = "if nobody ended it by SIGKILL, the system did, short of memory: its log says so"
        raise _ChildEnded(f"was ended by {signal.Signals(-status).name}", hint)
    if not child.ready:
        last = (tail.strip().splitlines()[-1:] or ["nothing"])[0][:500]
        raise ChildUnavailable(
            f"ended with exit status {status} before its first request; its last output: {last}",
            "it runs the same Python with this process's sys.path: look there for a module that shadows one of Python's own",
        )
    if any(mark in tail for mark in _OUT_OF_MEMORY_MARKS):
        raise ChildOutOfMemory
    raise ChildDied(status, tail)


def _await_start(child: _Child, abandoned: Callable[[], bool] | None) -> None:
    if not _answers(child, _START_S, abandoned):
        raise ChildUnavailable(
            f"took longer than {_START_S:g} s to start", "the machine may be too busy, or stands still"
        )
    child.connection.recv()
    child.ready = True


def _answers(child: _Child, seconds: float, abandoned: Callable[[], bool] | None) -> bool:
    """Waits until the child answers or dies. Returns False if neither happens in time.

    Raises:
        ChildAbandoned: the answer is no longer needed.
    """
    if abandoned is None:
        return child.connection.poll(seconds)
    until = time.monotonic() + seconds
    while not child.connection.poll(min(_LOOK_S, seconds)):
        if abandoned():
            raise ChildAbandoned
        if time.monotonic() >= until:
            return False
    return True


def _tail(stream: IO[bytes], start: int) -> str:
    """The end of the file from position `start` on."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(start, size - _STDERR_TAIL_BYTES))
    return stream.read().decode(errors="replace")


def _be_ended_first() -> None:
    """Has the system, short of memory, end this process rather than the user's, which holds the models."""
    with suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_memory(wanted: int) -> None:
    """Limits the memory that this process may map, to less than is wanted where `ulimit -v` allows no more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mapped_bytes() -> int:
    """Bytes of memory that this process has mapped; 0 if the system does not tell."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[0]) * resource.getpagesize() if told.exists() else 0


def _end_with_parent(parent: int) -> None:
    """Ends this process as soon as its parent is gone, even in the middle of a request."""
    while os.getppid() == parent:
        time.sleep(_ALIVE_S)
    os._exit(0)


def _fault(request: object) -> str:
    """The kind of fault that a request, or a part of one, asks for; None if it asks for none."""
    pieces = request if isinstance(request, tuple) else (request,)
    texts = [piece if isinstance(piece, bytes) else str(piece).encode() for piece in pieces]
    return next((text.removeprefix(b"fault:").decode() for text in texts if text.startswith(b"fault:")), "")


def _fail(kind: str) -> None:
    if kind == "abort":
        os.abort()
    if kind == "sleep":
        time.sleep(3600)
    if kind == "allocate":
        bytearray(1 << 50)
