"""The child process that runs torch-mlir's passes: `python -m dynaxla.lowering.worker FD MEMORY_BYTES`.

It reads (module, version) from the connection and answers with what `passes.lower` gives. It ends when the connection
closes. With `--inject-faults` it also obeys a few ways to die, which the tests of the parent need.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from dynaxla.lowering import passes


def main(arguments: list[str]) -> None:
    connection = Connection(int(arguments[0]))
    _limit_memory(int(arguments[1]))
    inject = "--inject-faults" in arguments
    while True:
        try:
            module, version = connection.recv()
        except EOFError:
            return
        if inject and version.startswith("fault:"):
            _fail(version.removeprefix("fault:"))
        connection.send(passes.lower(module, version))


def _limit_memory(limit_bytes: int) -> None:
    """Limits what lowering may take beyond what the process has mapped already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _fail(kind: str) -> None:
    if kind == "abort":
        os.abort()
    if kind == "sleep":
        time.sleep(3600)
    if kind == "allocate":
        bytearray(1 << 50)


if __name__ == "__main__":
    main(sys.argv[1:])
