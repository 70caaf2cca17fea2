"""Local variables of running functions of torch, and the lines of the user that run or raise."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from traceback import extract_tb
from types import TracebackType
from typing import Any

import torch


def variables_of(function: str, module: str) -> Mapping[str, Any] | None:
    """Returns the local variables of the innermost running call of a function of a module, by their names; else None."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals["__name__"] == module:
            return frame.f_locals
        frame = frame.f_back
    return None


def user_line() -> str:
    """Returns " at file:line" of the innermost running Python line outside of torch and of this package; "" if there is none.

    Relies on the folders in which the two are installed.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            return f" at {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def raising_line(traceback: TracebackType | None) -> str | None:
    """Returns "file:line in function: code" of the innermost line of a traceback outside of torch and of this package; None if
    there is none. Relies on the folders in which the two are installed."""
    lines = [line for line in extract_tb(traceback) if not line.filename.startswith(_OWN)]
    if not lines:
        return None
    place = f"{lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}"
    return f"{place}: {lines[-1].line}" if lines[-1].line else place


_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
