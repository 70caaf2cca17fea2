"""PJRT executables that are loaded, and their runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from dynaxla.errors import ExecutionError
from dynaxla.isolation.forking import follow, new_lock
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.executable_info import PjrtCompiled


def packed(serialized: bytes) -> bytes:
    """What PJRT serialized, in a fifth of its bytes: it is kept in memory, on disk and in packages."""
    return zlib.compress(serialized, level=1)


class PjrtExecutable(PjrtCompiled):
    """A PJRT executable loaded on one device.

    Args:
        load: gives the handle; called again in a forked child that runs the program, as the parent's handle belongs to
            the parent's client.
        serialized: gives what a client of another process can load, of the handle; None: PJRT serializes it.
    """

    def __init__(self, load: Callable[[], Any], serialized: Callable[[Any], bytes | None] | None = None) -> None:
        super().__init__(load())
        self._load = load
        self._serialized = serialized
        self._execute = self._handle.execute_sharded
        self._error = xla.load().Error
        self._scope = xla.load().TracebackScope
        self._handlers: list[Any] | None = None
        self._lock = new_lock()
        follow(self)

    def serialized(self) -> bytes | None:
        """What `Client.load` takes in another process; None where the platform cannot serialize it."""
        if self._serialized is not None:
            return self._serialized(self._handle)
        try:
            return packed(bytes(self._handle.serialize()))
        except self._error:
            return None

    def after_fork(self) -> None:
        self._execute = self._execute_anew
        self._handlers = None  # they name the parent's device

    def _execute_anew(self, arguments: Sequence[Buffer]) -> Any:
        with self._lock:
            if self._execute == self._execute_anew:
                self._handle = self._load()
                self._execute = self._handle.execute_sharded
        return self._execute(arguments)

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program.

        Raises:
            ExecutionError: PJRT refused the arguments or the run failed at once; a run that fails later raises when
                an output is read.
        """
        try:
            with self._scope():
                results = self._execute(arguments)
                handlers = self._handlers
                if handlers is not None:
                    return results.consume_with_handlers(handlers)  # type: ignore[no-any-return]
                outputs = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        except self._error as error:
            raise ExecutionError(
                explanation=str(error), hint="set DYNAXLA_DEBUG=dump=DIR and look at the HLO"
            ) from error
        self._handlers = list(map(xla.maker_like, outputs))
        return outputs
