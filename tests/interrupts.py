"""Interrupts (Ctrl-C) of the main thread, where a test wants them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from dynaxla.runtime.loaded_executables import PjrtExecutable


def interrupt() -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Interrupts raise KeyboardInterrupt, also where a shell had them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_behind_donating_runs() -> Iterator[list[int]]:
    """An interrupt comes behind each run that took the memory of an argument. Gives how many arguments it had, of each."""
    run, interrupted = PjrtExecutable.run, []

    def run_and_interrupt(executable: PjrtExecutable, arguments: list[Any]) -> list[Any]:
        results = run(executable, arguments)
        if any(buffer.is_deleted() for buffer in arguments):
            interrupted.append(len(arguments))
            interrupt()
        return results

    with interruptible(), mock.patch.object(PjrtExecutable, "run", run_and_interrupt):
        yield interrupted
