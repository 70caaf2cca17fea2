"""How long tests take: those over three seconds, listed in times.tsv, are in the full list alone.

`./run_tests.sh --write-times` runs the quick list and adds to the table what took longer; `--full --write-times` writes the
table anew. Only an idle machine gives times worth writing.
"""

from __future__ import annotations

import functools
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
