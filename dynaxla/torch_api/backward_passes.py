"""Which thread runs the backward pass for tensors of a device in Python, and how its errors are raised."""

from __future__ import annotations

import threading
from functools import cache, wraps
from typing import Any

import torch


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
    """Returns the device's type to torch.

    torch also asks for it while a C++ exception leaves a node of a backward pass, to restore the stream. If Python code
    raised that exception, in a hook or a kernel, its error indicator is still set: then any call from C++ fails, and
    the process aborts, because nothing may be raised there. So the guard takes the error, which is raised at the end of
    the pass.

    Relies on methods with an argument of type `Py_ssize_t`, such as `str.ljust`: for -1 they check whether an error is
    set, since -1 is also what a failed conversion returns, and raise that error.
    """

    def type_(self) -> Any:
        try:
            "".ljust(-1)
        except BaseException as error:
            _raised().error = error
        return torch._C._autograd.DeviceType.PrivateUse1


def run_backward_in_caller() -> None:
    """Runs every backward pass on the calling thread, and raises the error that `Guard` took.

    torch's engine starts one thread for each device that exists at the first backward pass of the process, and later
    fails with an internal error for a device registered after it. On the caller's thread no thread has to be started.

    Relies on `_engine_run_backward`, which `torch.autograd` and `torch.autograd.graph` call by that name, on
    `torch.autograd.set_multithreading_enabled`, which applies to the calling thread, and on the engine raising
    SystemError if it fails with an error that is no longer set.
    """
    run = torch.autograd.graph._engine_run_backward

    @wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except SystemError:
            error = _raised().take()
            if error is None:
                raise
        raise error

    torch.autograd.graph._engine_run_backward = run_here  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]
