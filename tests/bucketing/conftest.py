"""A pad rule that fails is a bug, although the exact shape that it leads to is right all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynaxla.metrics.recorder import Recorder
from tests.bucketing.poison import failed_rules


@pytest.fixture(autouse=True)
def _no_rule_fails(recorder: Recorder) -> Iterator[None]:
    before = recorder.snapshot()
    yield
    assert not failed_rules(before, recorder.snapshot())
