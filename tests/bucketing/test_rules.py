"""Pad rules: for every size in a bucket the cropped results are eager's, whatever the padding holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dynaxla.ops.table import core_table
from tests.bucketing import (
    backward_cases,
    composed_cases,
    data_cases,
    image_cases,
    layer_cases,
    matrix_cases,
    more_cases,
    number_cases,
    plain_cases,
    recurrent_cases,
    window_cases,
)
from tests.bucketing.eager_programs import Runs, eager_programs_after
from tests.bucketing.poison import Case, UsedRules, check, poison

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
    *recurrent_cases.CASES,
    *composed_cases.CASES,
]


FIRST = {tested.rule: tested for tested in reversed(CASES)}
"""Of each rule, the first case."""
EACH = 2
"""Of each rule, so many cases are in the quick list."""


def _cases() -> Iterator[Any]:
    seen: Counter[str | None] = Counter()
    for tested in CASES:
        seen[tested.rule] += 1
        yield pytest.param(tested, marks=() if seen[tested.rule] <= EACH else pytest.mark.long, id=str(tested))


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> UsedRules:
    return poison(monkeypatch)


@pytest.mark.parametrize("tested", _cases())
def test_padding_reaches_no_result(tested: Case, rules: UsedRules, full: bool) -> None:
    """Programs are run op by op, but for that of a first bucket, which is XLA's: of one case of each rule, or of every case."""
    with eager_programs_after(int(full or tested is FIRST[tested.rule]), Runs()):
        check(tested)
    assert tested.rule is None or tested.rule in rules.used


@pytest.mark.slow
@pytest.mark.parametrize("tested", CASES, ids=str)
def test_padding_reaches_no_result_of_xla(tested: Case, rules: UsedRules) -> None:
    check(tested)


OF_SEVERAL_PROCESSES = {"collective", "all_gather", "reduce_scatter", "all_to_all"}
"""Rules of ops that one process cannot run: tests/distributed/test_compiled.py compares them, at sizes that vary."""


def test_every_rule_has_a_case() -> None:
    assert {tested.rule for tested in CASES} | OF_SEVERAL_PROCESSES >= {r.name for r in core_table().pads.values()}
