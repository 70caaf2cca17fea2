"""Sizes used as values: eager's numbers at every size; with -m slow also: padded, but for what docs/exact_shapes.md lists.

The quick list has some expressions of every family, spread over its table, --full has all.

Whether an expression is padded may depend on those that are compiled with it, so that the list is held against runs of its own.
"""

from __future__ import annotations

import warnings
from random import Random

import pytest
import torch

from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from tests.bucketing.poison import poison
from tests.bucketing.sized_runs import run_many
from tests.bucketing.sizes_as_values import FAMILIES, SIZES
from tests.bucketing.sizes_as_values.checking import Dynamic, examine, is_exact, valid_sizes
from tests.bucketing.sizes_as_values.exact_shapes import MODES, Listed, findings
from tests.bucketing.sizes_as_values.expression import Family
from tests.tolerances import assert_close

LISTED = Listed.read()
EACH = 24  # of the expressions that run together, one of so many is in the quick list
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace(" ", "_"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@pytest.mark.timeout(900)
@EVERY
def test_expressions_are_right(family: Family, full: bool) -> None:
    """Those that are padded; one half under dynamic=True, the other by default: Dynamo takes most of the time."""
    first = FAMILIES.index(family)
    found = []
    for place, mode in enumerate(MODES):
        every = list(LISTED.padded(family, mode))
        for texts in every[(first + place) % 2 :: 2]:
            found += examine(family, texts if full else texts[::EACH], mode)
    assert not [finding for finding in found if finding.kind in ("wrong", "failed")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@EVERY
@pytest.mark.parametrize("dynamic", MODES, ids=str)
def test_every_expression_is_as_the_list_says(family: Family, dynamic: Dynamic) -> None:
    found = list(findings(family, dynamic, LISTED))
    assert not [each for each in found if each.kind in ("wrong", "failed")]
    assert {each.text for each in found} == set(LISTED.of(family, dynamic))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EVERY
def test_what_is_listed_is_not_padded(family: Family) -> None:
    for text in dict.fromkeys([*LISTED.of(family, MODES[0]), *LISTED.of(family, MODES[1])]):
        mode = next(mode for mode in MODES if text in LISTED.reasons[mode])
        assert is_exact(family, text, mode), f"padded now: {text}; write the list anew"


def test_the_list_names_expressions_of_the_tables() -> None:
    known = {text for family in FAMILIES for text in family.texts}
    assert len(known) >= 400
    assert {text for reasons in LISTED.reasons.values() for text in reasons} <= known


@pytest.mark.long
@pytest.mark.timeout(900)
def test_programs_of_xla_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the expressions by the whole way."""
    poison(monkeypatch)
    random = Random(0)
    for family in FAMILIES:
        listed = LISTED.reasons[True]
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
    family = next(family for family in FAMILIES if "x.softmax(1) * s" in family.texts)
    assert not examine(family, ["x.softmax(1) * s"], True)
    monkeypatch.setattr(PaddedGraphBuilder, "mask", lambda build, value, dims, fill: value)
    assert [finding.kind for finding in examine(family, ["x.softmax(1) * s"], True)] == ["wrong"]


@pytest.mark.timeout(900)
def test_random_programs_with_sizes_as_values(full: bool) -> None:
    told: list[str] = []
    wanted = 400 if full else 60
    tally = run_many(seed=0, wanted=wanted, sizes=24, tell=told.append)
    assert not told, "\n".join(told)
    assert tally.cases >= wanted
