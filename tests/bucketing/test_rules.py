"""Pad rules: for every size in a bucket the cropped results are eager's, whatever the padding holds."""

from __future__ import annotations

import pytest

from dynaxla.ops.spec import PadRule
from tests.bucketing import (
    backward_cases,
    data_cases,
    image_cases,
    layer_cases,
    matrix_cases,
    more_cases,
    number_cases,
    plain_cases,
    window_cases,
)
from tests.bucketing.poison import Case, RecordingRules, check, poison

CASES: list[Case] = [
    *plain_cases.CASES,
    *data_cases.CASES,
    *layer_cases.CASES,
    *image_cases.CASES,
    *more_cases.CASES,
    *backward_cases.CASES,
    *window_cases.CASES,
    *matrix_cases.CASES,
    *number_cases.CASES,
]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> RecordingRules:
    return poison(monkeypatch)


@pytest.mark.parametrize("tested", CASES, ids=str)
def test_padding_reaches_no_result(tested: Case, rules: RecordingRules) -> None:
    check(tested)
    assert tested.rule is None or tested.rule in rules.used


def test_every_rule_has_a_case() -> None:
    assert {tested.rule for tested in CASES} >= set(PadRule)
