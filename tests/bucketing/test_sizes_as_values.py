"""Sizes used as values: eager's numbers at every size, and padded, but for the expressions that docs/exact_shapes.md lists."""

from __future__ import annotations

import warnings
from random import Random

import pytest
import torch

import dynaxla
from tests.bucketing.poison import poison
from tests.bucketing.sized_runs import run_many
from tests.bucketing.sizes_as_values import FAMILIES, SIZES
from tests.bucketing.sizes_as_values.checking import Dynamic, examine, valid_sizes
from tests.bucketing.sizes_as_values.expression import Family
from tests.bucketing.sizes_as_values.refusals import MODES, Refusals
from tests.tolerances import assert_close

REFUSALS = Refusals.read()
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace(" ", "_"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@pytest.mark.timeout(900)
@EVERY
@pytest.mark.parametrize("dynamic", MODES, ids=str)
def test_expressions_are_padded_and_right(family: Family, dynamic: Dynamic) -> None:
    found = [finding for texts in REFUSALS.padded(family, dynamic) for finding in examine(family, texts, dynamic)]
    assert not found


@pytest.mark.timeout(900)
@EVERY
def test_what_is_listed_as_exact_is_exact_and_right(family: Family) -> None:
    for dynamic in MODES:
        for text in REFUSALS.of(family, dynamic):
            if dynamic is not MODES[0] and text in REFUSALS.reasons[MODES[0]]:
                continue
            found = examine(family, [text], dynamic)
            assert [finding.kind for finding in found] in (["exact"], ["eager"]), (text, found)


def test_the_list_names_expressions_of_the_tables() -> None:
    known = {text for family in FAMILIES for text in family.texts}
    assert len(known) >= 400
    assert {text for reasons in REFUSALS.reasons.values() for text in reasons} <= known


@pytest.mark.timeout(900)
def test_programs_of_xla_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the expressions by the whole way."""
    poison(monkeypatch)
    random = Random(0)
    for family in FAMILIES:
        listed = REFUSALS.reasons[True]
        text = random.choice([text for text in family.texts if text not in listed])
        function = family.function(text)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="dynaxla", dynamic=True)
        for s, t in [sizes for sizes in SIZES[:3] if sizes in valid_sizes(family, text)]:
            mine, eager = family.make(s, t), family.make(s, t)
            (actual,), (expected,) = compiled(*mine), function(*eager)
            assert_close(actual.detach(), expected.detach())
            for got, wanted in zip(mine, eager, strict=True):
                assert_close(got.detach(), wanted.detach())


def test_padding_that_is_not_masked_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: where masks are left out, and where a size counts from the wrong end."""
    from dynaxla.bucketing.builder import Builder

    family = next(family for family in FAMILIES if "x.softmax(1) * s" in family.texts)
    assert not examine(family, ["x.softmax(1) * s"], True)
    monkeypatch.setattr(Builder, "mask", lambda build, value, dims, fill: value)
    assert [finding.kind for finding in examine(family, ["x.softmax(1) * s"], True)] == ["wrong"]


@pytest.mark.timeout(900)
def test_random_programs_with_sizes_as_values() -> None:
    told: list[str] = []
    torch._dynamo.reset()
    before = dynaxla.read_metrics()
    tally = run_many(seed=0, wanted=400, sizes=24, tell=told.append)
    assert not told, "\n".join(told)
    assert tally.cases >= 400
    assert dynaxla.read_metrics().graphs > before.graphs
