"""How torch's autograd runs the backward pass of tensors of a device in Python: on which thread, and what if it raises."""

from __future__ import annotations

import threading
from functools import cache, wraps
from typing import Any

import torch


class _Raised(threading.local):
    """What a backward pass of this thread raised, if the guard took it."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        error, self.error = self.error, None
        return error


@cache
def _raised() -> _Raised:
    return _Raised()


class Guard(torch._C._acc.DeviceGuard):
    """Says of what type the device is.

    torch asks for it also while a C++ exception leaves a node of a backward pass, to put the stream back. Where Python code
    raised that exception, a hook or a kernel, its error is still set: then any call from C++ fails, and the process ends, as
    nothing may be raised there. So the error is taken, to be raised at the end of the pass.

    Relies on methods with a size of type `Py_ssize_t`, as `str.ljust`: given -1 they ask whether an error is set, as -1 is also
    what a failed conversion gives, and raise it.
    """

    def type_(self) -> Any:
        try:
            "".ljust(-1)
        except BaseException as error:
            _raised().error = error
        return torch._C._autograd.DeviceType.PrivateUse1


def run_backward_in_caller() -> None:
    """Has every backward pass run on the thread that asked for it, and raise what the guard took.

    torch's engine starts a thread for each device there is when the process first runs a backward pass, and ends later with an
    internal error for a device that came after it. On the caller's thread there is nothing to start.

    Relies on `_engine_run_backward`, which `torch.autograd` and `torch.autograd.graph` call by that name, on
    `torch.autograd.set_multithreading_enabled`, which holds for the calling thread, and on SystemError where an engine fails
    for an error that is set no more.
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
