"""A child that was idle has ended, and the next request gets another: whether that was noticed before it was sent, or not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dynaxla.isolation.children import ChildProcess
from dynaxla.options import Limits
from tests.isolation.idle_child import IDLE_S

LIMITS = Limits(60.0, 1 << 30)


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess("tests.isolation.idle_child")
    yield made
    made.close()


def test_the_next_request_gets_another(child: ChildProcess) -> None:
    assert child.ask("first", LIMITS) == "first"
    pid = child.pid
    time.sleep(10 * IDLE_S)
    assert child.ask("second", LIMITS) == "second"
    assert child.pid != pid


def test_a_request_that_meets_the_end_is_sent_anew(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert child.ask("first", LIMITS) == "first"
    assert child._child is not None
    ended = child._child.process
    ended.wait()
    monkeypatch.setattr(ended, "poll", lambda: None)  # as if it ended just behind the look
    assert child.ask("second", LIMITS) == "second"
