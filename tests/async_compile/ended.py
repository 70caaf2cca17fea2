"""Waiting for what is compiled behind the calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dynaxla

LIMIT_S = 120.0


@contextmanager
def jobs(count: int) -> Iterator[None]:
    """Waits at the end of the block until so many jobs have ended since its beginning, well or not."""
    before = _ended()
    yield
    until(lambda: _ended() >= before + count)


def until(true: Callable[[], bool]) -> None:
    """Waits until it is true, and fails where that takes too long."""
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.01)


def _ended() -> int:
    metrics = dynaxla.read_metrics()
    return metrics.jobs_done + metrics.jobs_failed + metrics.jobs_dropped
