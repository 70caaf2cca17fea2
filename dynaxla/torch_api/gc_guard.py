"""Pauses Python's cyclic garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Context without garbage collection: many new long-lived objects trigger collections that find nothing to free.

    If several threads are in it, collection is on again when the first of them leaves.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
