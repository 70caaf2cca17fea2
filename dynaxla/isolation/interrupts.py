"""Keeps interrupts (Ctrl-C, alarms) out of work that cannot be done a second time once it is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_RAISING = (signal.SIGINT, signal.SIGALRM)
"""Signals whose handlers raise: of Ctrl-C, and of timeouts by `signal.alarm`."""


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Has an interrupt that comes meanwhile raised at the end; a second one is raised at once, as this may wait for others.

    Python runs the handlers of signals between any two instructions of the main thread. Raised while a native library is
    imported, KeyboardInterrupt leaves the library loaded and its module gone: what it registers cannot be registered again.
    In other threads, which no signal reaches, and for signals without a handler of Python's this does nothing.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _RAISING:
                stack.enter_context(_defer(number))
        yield


@contextmanager
def _defer(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    if not callable(handler):
        yield
        return
    pending: list[FrameType | None] = []

    def note(_: int, frame: FrameType | None) -> None:
        if pending:
            handler(number, frame)
        else:
            pending.append(frame)

    signal.signal(number, note)
    try:
        yield
    finally:
        if signal.getsignal(number) is note:  # else the work has set a handler of its own
            signal.signal(number, handler)
        if pending:
            handler(number, pending[0])
