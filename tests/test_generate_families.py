"""transformers' `generate` as it is: eager's tokens from few programs and captures, whatever the lengths and the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs
from tests.generation.families import FAMILIES, TEN
from tests.generation.ways import WAYS, count

MOST_PROGRAMS = 10
# The encoder runs at the batch, its results are repeated for every beam, and the decoder's graphs meet both.
MORE_PROGRAMS = {("t5", "beams"): 11}
# The first half meets every bucket of prompts (64 to 256) and of caches (64 to 256), the second has other sizes in them.
LENGTHS = (26, 8, 100, 190, 62, 200, 125, 29, 5, 77, 180, 110)
NEW_TOKENS = 5

QUICK = (("llama", "dynamic"), ("t5", "dynamic"))
LONG = (*itertools.product(TEN, ("dynamic",)), *itertools.product(("llama", "gemma3"), ("static", "beams", "batch")))


def _cases() -> Iterator[Any]:
    for case in itertools.product(TEN, ("dynamic", "static", "beams", "batch")):
        marks = () if case in QUICK else (pytest.mark.long if case in LONG else pytest.mark.slow,)
        yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("name", "way"), _cases())
def test_ten_programs_do_for_prompts_of_any_length(name: str, way: str, recorder: Recorder) -> None:
    counts = count(FAMILIES[name], WAYS[way], recorder, eager_programs, LENGTHS, NEW_TOKENS)
    assert counts.wrong == 0
    assert 0 < counts.programs <= MORE_PROGRAMS.get((name, way), MOST_PROGRAMS)
    assert counts.late == 0
    assert not counts.exact_shapes
    assert not counts.last_captures
    assert counts.eager_ops == 0
