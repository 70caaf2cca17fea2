"""How long tests take: those over three seconds, listed in times.tsv, are in the full list alone.

`./run_tests.sh --write-times` runs the quick list and adds to the table what took longer; `--full --write-times` writes the
table anew. Only an idle machine gives times worth writing.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("times.tsv")
LONGEST_QUICK_TEST_S = 3.0


@functools.cache
def read_times() -> dict[str, float]:
    """Seconds by node id."""
    lines = (line.rsplit("\t", 1) for line in TABLE.read_text().splitlines())
    return {node_id: float(seconds) for node_id, seconds in lines}


def is_long(item: pytest.Item) -> bool:
    """Whether the item is in the full list alone: it is marked so, or its time is."""
    return item.get_closest_marker("long") is not None or item.nodeid in read_times()


class TimeLimit:
    """A plugin that leaves a long test out where the short ones, at their pace so far, would else end after so many minutes.

    One machine of a run may be several times as slow as another. A worker does not know which tests it will be given: it
    counts with an even share of them.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._end = time.monotonic() + 60 * minutes
        self._left = 0.0
        self._done = 0
        self._seconds = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._left = sum(not is_long(item) for item in session.items) / workers

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begun = time.monotonic()
        result = yield
        if not is_long(item):
            self._left -= 1
            self._done += 1
            self._seconds += time.monotonic() - begun
        return result

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        pace_s = self._seconds / max(self._done, 1)
        if is_long(item) and time.monotonic() + pace_s * max(self._left, 0.0) > self._end:
            pytest.skip(f"a long test, left out as the list would end after {self._minutes:g} minutes")


class TimesWriter:
    """A plugin that sums what setup, call and teardown of each test took, and writes the table when the run ends."""

    def __init__(self, known: dict[str, float]) -> None:
        self._known = known
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        times = self._known | {node_id: s for node_id, s in self._seconds.items() if s > LONGEST_QUICK_TEST_S}
        TABLE.write_text("".join(f"{node_id}\t{seconds:.1f}\n" for node_id, seconds in sorted(times.items())))
