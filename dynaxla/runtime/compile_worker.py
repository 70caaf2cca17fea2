"""XLA's CPU compiler in child processes. `python -m dynaxla.runtime.compile_worker FD` is the child."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from dynaxla.errors import CompileCrashed, CompileError, CompileOutOfMemory, CompileTimeout, CompileUnavailable
from dynaxla.isolation.children import (
    ChildDied,
    ChildOutOfMemory,
    ChildProcess,
    ChildTookTooLong,
    ChildUnavailable,
    serve,
)
from dynaxla.isolation.failures import CompilerFailure, KnownFailures
from dynaxla.isolation.pool import ChildPool
from dynaxla.options import Limits
from dynaxla.runtime.executable_info import CompileRejected, ModuleRequest, SerializedExecutable
from dynaxla.runtime.xla import compile_module


class CompileWorker:
    """Compiles for the embedded CPU client; safe from several threads.

    Args:
        failures: modules, by digest, that crashed a child: they are not compiled again.
        most: the number of programs compiled in parallel.
    """

    def __init__(self, failures: KnownFailures, *, most: int = 1, inject_faults: bool = False) -> None:
        self.pool = ChildPool("dynaxla.runtime.compile_worker", most, inject_faults=inject_faults)
        self._failures = failures

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> bytes | None:
        """Returns the serialized executable; None if it cannot be serialized: this process can then compile the module safely.

        Args:
            partitions: the number of devices over which the module is partitioned.

        Raises:
            CompileError: XLA refused the module.
            CompileCrashed: the child crashed, now or in an earlier process.
            CompileTimeout: the compile took longer than the limit.
            CompileOutOfMemory: the compile took more memory than the limit.
            CompileUnavailable: no child could be started, or two were ended from outside.
        """
        key = hashlib.sha256(module).hexdigest()
        if (known := self._failures.get(key)) is not None:
            raise CompileCrashed(f"{known.explanation} (remembered)")
        try:
            request = ModuleRequest(module, partitions)
            reply: SerializedExecutable | CompileRejected = request_compile(self.pool, request, limits)
        except CompileCrashed as crashed:
            self._failures.add(key, CompilerFailure("a whole program", crashed.id, crashed.explanation), on_disk=True)
            raise
        if isinstance(reply, CompileRejected):
            raise CompileError(f"XLA's cpu compiler refused the program: {reply.message}", hint="report the module")
        return reply.executable


def request_compile(child: ChildProcess | ChildPool, request: object, limits: Limits) -> Any:
    """Sends a request to a compiling child and returns its reply.

    Raises:
        CompileCrashed: the child crashed.
        CompileTimeout: the request took longer than the limit.
        CompileOutOfMemory: the request took more memory than the limit.
        CompileUnavailable: no child could be started, or two were ended from outside.
    """
    try:
        return child.ask(request, limits)
    except ChildUnavailable as error:
        raise CompileUnavailable(f"the process that compiles {error.why}", error.hint) from None
    except ChildDied as died:
        raise CompileCrashed.of(died.exit_status, died.stderr_tail) from None
    except ChildTookTooLong:
        raise CompileTimeout(limits.seconds) from None
    except ChildOutOfMemory:
        raise CompileOutOfMemory(limits.memory_bytes) from None


if __name__ == "__main__":
    import jax  # noqa: F401 - registers the library calls (LAPACK) that its lowerings make

    serve(sys.argv[1:], compile_module)
