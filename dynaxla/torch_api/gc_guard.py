"""Python's cyclic collector, while objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """While it lasts, nothing looks for garbage: of many new objects none is any, and each look walks over all there are.

    Threads that are in it at once end it with the first of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
