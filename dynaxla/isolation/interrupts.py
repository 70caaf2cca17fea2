"""Keeps interrupts (Ctrl-C, alarms) out of work that cannot be done a second time once it is half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which take ten times as long
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident, main_thread
from types import FrameType

_RAISING = (signal.SIGINT.value, signal.SIGALRM.value)
"""Signals whose handlers raise: of Ctrl-C, and of timeouts by `signal.alarm`."""


def defer_interrupts() -> AbstractContextManager[None]:
    """Has an interrupt that comes meanwhile raised at the end; a second one is raised at once, as this may wait for others.

    Python runs the handlers of signals between any two instructions of the main thread. Raised while a native library is
    imported, KeyboardInterrupt leaves the library loaded and its module gone: what it registers cannot be registered again.
    Raised behind a run that takes the memory of tensors, it leaves them without their new values. In other threads, which no
    signal reaches, and for signals without a handler of Python's this does nothing.
    """
    return _Deferral()


class _Deferral(AbstractContextManager[None]):
    __slots__ = ("_handlers", "_pending")

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        for number in _RAISING:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending:
            self._handlers[number](number, frame)
        self._pending[number] = frame

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:  # else the work has set a handler of its own
                _signal.signal(number, handler)
        for number, frame in self._pending.items():
            self._handlers[number](number, frame)
