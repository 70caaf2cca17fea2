"""On which thread torch's autograd runs the backward pass of tensors of a device in Python."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch


def run_backward_in_caller() -> None:
    """Has every backward pass run on the thread that asked for it.

    torch's engine starts a thread for each device there is when the process first runs a backward pass, and ends later with an
    internal error for a device that came after it. On the caller's thread there is nothing to start.

    Relies on `_engine_run_backward`, which `torch.autograd` and `torch.autograd.graph` call by that name, and on
    `torch.autograd.set_multithreading_enabled`, which holds for the calling thread.
    """
    run = torch.autograd.graph._engine_run_backward

    @wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = run_here  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]
