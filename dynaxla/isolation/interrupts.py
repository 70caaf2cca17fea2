"""Keeps an interrupt (Ctrl-C) out of work that cannot be done a second time once it is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Has an interrupt that comes meanwhile raised at the end; a second one is raised at once, as this may wait for others.

    Python runs the handler of SIGINT between any two instructions of the main thread. Raised while a native library is
    imported, KeyboardInterrupt leaves the library loaded and its module gone: what it registers cannot be registered again.
    In other threads, which no signal reaches, and where SIGINT has no handler of Python's this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pending:
            handler(number, frame)
        else:
            pending.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else the work has set a handler of its own
            signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])
