"""torch-mlir's passes at arm's length: an abort, a hang or memory exhaustion ends a child process, not the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

from dynaxla.errors import LoweringCrashed, LoweringFailed, LoweringOutOfMemory, LoweringTimeout
from dynaxla.lowering.passes import Lowered, Rejected

_STDERR_TAIL_BYTES = 4000
_OUT_OF_MEMORY_MARKS = (
    "bad_alloc",
    "out of memory",
    "MemoryError",
    "Cannot allocate memory",
    "failed to map segment",  # the dynamic linker
    "Memory allocation still failed",  # OpenBLAS
)


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    owner_pid: int

    def stop(self) -> None:
        """Ends the child and reaps it; in a forked copy of the parent, only lets go of it."""
        self.connection.close()
        if os.getpid() == self.owner_pid:
            self.process.kill()
            self.process.wait()
        self.stderr.close()


class LoweringWorker:
    """One child process, started at the first request and after every failure; safe from several threads.

    Args:
        timeout_s: longest time one module may take, in seconds.
        memory_bytes: most memory one child may map beyond what it has when it starts.
        inject_faults: lets tests make the child fail.
    """

    def __init__(self, timeout_s: float = 120.0, memory_bytes: int = 8 << 30, *, inject_faults: bool = False) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._inject_faults = inject_faults
        self._child: _Child | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=partial(_after_fork, weakref.ref(self)))

    def lower(self, module: bytes, version: str, timeout_s: float | None = None) -> bytes:
        """Lowers a serialized module of the torch dialect to a StableHLO portable artifact.

        Raises:
            LoweringFailed: torch-mlir rejected the module.
            LoweringCrashed: the child died.
            LoweringTimeout: it took longer than the limit.
            LoweringOutOfMemory: it wanted more memory than the limit.
        """
        with self._lock:
            child = self._ready_child()
            try:
                reply = self._ask(child, module, version, timeout_s or self._timeout_s)
            except BaseException:  # a KeyboardInterrupt too leaves a reply under way that nobody will read
                self._discard()
                raise
        if isinstance(reply, Rejected):
            raise LoweringFailed(reply.stage, reply.diagnostics)
        return reply.artifact

    def close(self) -> None:
        """Ends the child, if there is one."""
        with self._lock:
            self._discard()

    def _ask(self, child: _Child, module: bytes, version: str, timeout_s: float) -> Lowered | Rejected:
        said = os.fstat(child.stderr.fileno()).st_size
        try:
            child.connection.send((module, version))
            if not child.connection.poll(timeout_s):
                raise LoweringTimeout(timeout_s)
            reply: Lowered | Rejected = child.connection.recv()
            return reply
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = child.process.wait()
            tail = _tail(child.stderr, said)
        if any(mark in tail for mark in _OUT_OF_MEMORY_MARKS):
            raise LoweringOutOfMemory(self._memory_bytes)
        raise LoweringCrashed(status, tail)

    def _ready_child(self) -> _Child:
        child = self._child
        if child is not None and child.process.poll() is not None:
            self._discard()
        if self._child is None:
            self._child = self._start()
            weakref.finalize(self, self._child.stop)
        return self._child

    def _start(self) -> _Child:
        ours, theirs = Pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the child owns it as long as it lives)
        command = [sys.executable, "-m", "dynaxla.lowering.worker", str(theirs.fileno()), str(self._memory_bytes)]
        process = subprocess.Popen(
            command + (["--inject-faults"] if self._inject_faults else []),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for the parent to handle
        )
        theirs.close()
        return _Child(process, ours, stderr, os.getpid())

    def _discard(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _start_over(self) -> None:
        """In a forked copy of the process: lets go of the parent's child, and of a lock some thread held."""
        self._lock = threading.Lock()
        self._discard()


def _after_fork(worker: weakref.ref[LoweringWorker]) -> None:
    found = worker()
    if found is not None:
        found._start_over()


def _tail(stream: IO[bytes], start: int) -> str:
    """The end of what was written from `start` on."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(start, size - _STDERR_TAIL_BYTES))
    return stream.read().decode(errors="replace")
