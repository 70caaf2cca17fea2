"""Loaded PJRT executables, and the limit of memory mappings, of which each loaded CPU program has three or more."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynaxla.errors import CompileUnavailable, ExecutionError
from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.executable_info import MemoryUse, PjrtCompiled


def compress_executable(serialized: bytes) -> bytes:
    """Compresses a serialized executable to a fifth of its size, for memory, disk and packages."""
    return zlib.compress(serialized, level=1)


class PjrtExecutable(PjrtCompiled):
    """A PJRT executable loaded on one device.

    Attributes:
        on_refusal: serves a call whose arguments PJRT refused, or gives None; None: there is nothing that could.

    Args:
        load: returns the handle. A forked child that runs the program calls it again, as the parent's handle belongs to
            the parent's client.
        serialized: returns the handle's bytes for `Client.load` in another process; None: PJRT serializes the handle.
    """

    def __init__(self, load: Callable[[], Any], serialized: Callable[[Any], bytes | None] | None = None) -> None:
        super().__init__(load())
        self._load = load
        self._serialized = serialized
        self._execute = self._handle.execute_sharded
        self._error = xla.load().Error
        self._scope = xla.load().TracebackScope
        self._handlers: list[Any] | None = None
        self.on_refusal: Callable[[Sequence[Buffer]], list[Buffer] | None] | None = None
        self._lock = new_lock()
        notify_after_fork(self)

    def serialize(self) -> bytes | None:
        """The executable in bytes that `Client.load` takes in another process; None if the platform cannot serialize it."""
        if self._serialized is not None:
            return self._serialized(self._handle)
        try:
            return compress_executable(bytes(self._handle.serialize()))
        except self._error:
            return None

    def memory_use(self) -> MemoryUse:
        """See `PjrtCompiled.memory_use`; zeros where a plugin does not say."""
        try:
            return super().memory_use()
        except self._error:
            return MemoryUse(0, 0, 0, 0)

    def cost(self) -> dict[str, float]:
        """See `PjrtCompiled.cost`; empty where a plugin does not say."""
        try:
            return super().cost()
        except self._error:
            return {}

    def set_result_handlers(self, handlers: list[Any]) -> None:
        """Has the results be made by jaxlib's handlers: the arrays of a program over several devices."""
        self._handlers = handlers

    def after_fork(self) -> None:
        self._execute = self._reload_and_execute
        self._handlers = None  # the handlers refer to the parent's device

    def _reload_and_execute(self, arguments: Sequence[Buffer]) -> Any:
        with self._lock:
            if self._execute == self._reload_and_execute:
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
            served = None if self.on_refusal is None else self.on_refusal(arguments)
            if served is not None:
                return served
            raise ExecutionError(
                explanation=str(error), hint="set DYNAXLA_DEBUG=dump=DIR and look at the HLO"
            ) from error
        self._handlers = list(map(xla.buffer_maker, outputs))
        return outputs


class SynchronousExecutable(PjrtExecutable):
    """An executable whose runs have ended when `run` returns: the memory of its arguments may be written then."""


_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPPINGS = Path("/proc/self/maps")
_MAPPINGS_PER_PROGRAM = 64
"""Upper bound of a program's mappings. Mappings are counted again after as many loads as the free ones are sure to allow."""
_RESERVED_SHARE = 16
"""1/16 of the limit is reserved for threads, allocators and files."""


class MmapLimit:
    """Raises before the process runs out of memory mappings, when LLVM would abort. Not thread-safe.

    Args:
        most: the kernel's limit per process; None: the limit of /proc/sys/vm/max_map_count, or no limit on other systems.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _limit() if most is None else most
        self._uncounted = 0

    def check(self) -> None:
        """Checks that a program can be loaded; the caller calls it before each load.

        Raises:
            CompileUnavailable: too few mappings are left, even after a garbage collection.
        """
        if self._most is None or self._uncounted > 0:
            self._uncounted -= 1
            return
        room = self._room(self._most)
        if room < 0:
            gc.collect()
            room = self._room(self._most)
        if room < 0:
            raise CompileUnavailable(
                f"the process has nearly all of the {self._most} memory mappings that the kernel lets it have, and each "
                "program takes some",
                hint="raise it (sysctl vm.max_map_count=262144), or have fewer programs: larger buckets, fewer sizes",
            )
        self._uncounted = room // _MAPPINGS_PER_PROGRAM

    def _room(self, most: int) -> int:
        with _MAPPINGS.open("rb") as lines:
            return most - most // _RESERVED_SHARE - sum(1 for _ in lines)


def _limit() -> int | None:
    try:
        _MAPPINGS.open("rb").close()
        return int(_LIMIT.read_text())
    except (OSError, ValueError):
        return None
