"""Which thread runs the backward pass for tensors of a device in Python, and how its errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from itertools import repeat
from typing import Any

import torch

_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1


class _Raised(threading.local):
    """The exception of this thread's backward pass that `Guard` took, if any."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        error, self.error = self.error, None
        return error


@cache
def _raised() -> _Raised:
    return _Raised()


class Guard(torch._C._acc.DeviceGuard):
    """Returns the device's type to torch, which asks its attribute `type_`.

    torch asks where nothing may be raised: where it makes a node of a graph of autograd, and where it leaves one by a C++
    exception, to restore the stream. There are two ways to answer, as two kinds of exceptions may be in the way:

    - An interrupt: Python runs the handler of Ctrl-C at the begin of whatever function is entered next, and the process would
      abort. So the answer is made of callables of C (`partial`, `next`), which no handler interrupts.
    - An error that Python code raised during a backward pass, in a hook or a kernel: its indicator is still set, any call
      from C++ fails then, and the process aborts. So in a pass a method answers, takes the error, and has it raised at the end
      of the pass. Interrupts have to be deferred meanwhile.

    Relies on methods with an argument of type `Py_ssize_t`, such as `str.ljust`: for -1 they check whether an error is
    set, since -1 is also what a failed conversion returns, and raise that error.
    """

    # In the class itself, not only in its instance: where an error is set, Python's search through base classes drops it.
    __slots__ = ("_passes_elsewhere", "type_")

    def __init__(self) -> None:
        super().__init__()
        self.type_: Callable[[], Any] = partial(next, repeat(_DEVICE_TYPE))
        self._passes_elsewhere = False

    @contextmanager
    def take_errors(self) -> Iterator[None]:
        """Takes the errors of a backward pass. Only the main thread has interrupts: one elsewhere changes the way for good."""
        if threading.current_thread() is not threading.main_thread():
            self._passes_elsewhere = True
            self.type_ = self._take_error
            yield
            return
        before, self.type_ = self.type_, self._take_error
        try:
            yield
        finally:
            self.type_ = before
            if self._passes_elsewhere:  # one may just have begun
                self.type_ = self._take_error

    def _take_error(self) -> Any:
        try:
            "".ljust(-1)
        except BaseException as error:
            _raised().error = error
        return _DEVICE_TYPE


@cache
def guard() -> Guard:
    """The device's, one per process."""
    return Guard()


def run_backward_in_caller(defer_interrupts: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs every backward pass on the calling thread, and raises the error that `Guard` took.

    torch's engine starts one thread for each device that exists at the first backward pass of the process, and later
    fails with an internal error for a device registered after it. On the caller's thread no thread has to be started.

    Args:
        defer_interrupts: during a pass, see `Guard`.

    Relies on `_engine_run_backward`, which `torch.autograd` and `torch.autograd.graph` call by that name, on
    `torch.autograd.set_multithreading_enabled`, which applies to the calling thread, and on the engine raising
    SystemError if it fails with an error that is no longer set.
    """
    run = torch.autograd.graph._engine_run_backward

    @wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        try:
            with defer_interrupts(), guard().take_errors(), torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except SystemError:
            error = _raised().take()
            if error is None:
                raise
        raise error

    torch.autograd.graph._engine_run_backward = run_here  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]
