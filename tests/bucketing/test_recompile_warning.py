"""What is said of a part that has many programs: once for each reason, with the count and what to do."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.bucketing.recompile_warning import EXPECTED, RecompileWarnings
from dynaxla.bucketing.shape_keys import EXACT
from dynaxla.diagnostics import ExactShape
from dynaxla.options import Options

EXACT_KEYS = [(EXACT, size) for size in range(2, EXPECTED + 3)]
BUCKETS = [(8 * size,) for size in range(1, EXPECTED + 2)]


def test_each_reason_is_told_once() -> None:
    crowd = RecompileWarnings(Options(max_executables=12), chosen=False)
    crowd.refused = ExactShape("aten.some", "it has no rule")
    assert not list(crowd.notices(EXACT_KEYS[:EXPECTED], str))
    (notice,) = crowd.notices(EXACT_KEYS, str)
    assert (notice.count, "aten.some" in notice.reason) == (EXPECTED + 1, True)
    (notice,) = crowd.notices(BUCKETS, str)
    assert "bucket" in notice.reason
    (notice,) = crowd.notices([*EXACT_KEYS, *BUCKETS], str)
    assert "max_executables" in notice.reason
    assert not list(crowd.notices([*EXACT_KEYS, *BUCKETS], str))


def test_buckets_that_the_user_chose_are_no_news() -> None:
    assert not list(RecompileWarnings(Options(), chosen=True).notices(BUCKETS, str))


def test_the_ninth_exact_shape_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla", dynamic=True, options={"bucketing": "off"})
    before = dynaxla.read_metrics().many_programs
    for size in range(5, 5 + EXPECTED + 3):
        compiled(torch.zeros(size))
    (line,) = dynaxla.read_metrics().many_programs[len(before) :]
    assert str(EXPECTED + 1) in line
    assert line in dynaxla.report()
    assert [record.getMessage() for record in caplog.records].count(line) == 1
