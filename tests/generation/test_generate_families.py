"""transformers' `generate` as it is: eager's tokens from few programs and captures, whatever the lengths and the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs
from tests.generation.families import FAMILIES, TEN
from tests.generation.ways import WAYS, Counts, count

MOST_PROGRAMS = 10
# The first half meets every bucket of prompts (64 to 256) and of caches (64 to 256), the second has other sizes in them.
LENGTHS = (26, 8, 100, 190, 62, 200, 125, 29, 5, 77, 180, 110)
NEW_TOKENS = 5

# Beyond a window there are other graphs: of longer prompts, of the steps at which it fills up, and of those behind.
WINDOWS = ("mistral_window", "gemma3_window")
WINDOW_LENGTHS = (26, 8, 60, 100, 190, 47, 30, 77)
WINDOW_TOKENS = 24
# Drafts are verified a few tokens at a time, and their caches are cropped; the assistant is counted, too.
DRAFTED = (("llama", "lookup"), ("llama", "assisted"))

QUICK = (("llama", "dynamic"), ("t5", "dynamic"), ("llava", "dynamic"))
LONG = (*itertools.product(TEN, ("dynamic",)), *itertools.product(("llama", "gemma3"), ("static", "beams", "batch")))
MORE = (
    *itertools.product(("qwen2_vl", "idefics3", "lfm2", "mamba2", "falcon_h1", "qwen3_next", "bart"), ("dynamic",)),
    *itertools.product(("llama", "t5", "whisper"), ("sampled",)),
)


def _cases() -> Iterator[Any]:
    for case in itertools.product(TEN, ("dynamic", "static", "beams", "batch")):
        marks = () if case in QUICK else (pytest.mark.long if case in LONG else pytest.mark.slow,)
        yield pytest.param(*case, marks=marks)
    yield pytest.param("llava", "dynamic")
    for case in MORE:
        yield pytest.param(*case, marks=pytest.mark.long if case[0] in ("qwen2_vl", "lfm2") else pytest.mark.slow)


@pytest.mark.parametrize(("name", "way"), _cases())
def test_ten_programs_do_for_prompts_of_any_length(name: str, way: str, recorder: Recorder) -> None:
    counts = count(FAMILIES[name], WAYS[way], recorder, eager_programs, LENGTHS, NEW_TOKENS)
    assert counts.late == 0 or name not in TEN  # a picture adds its tokens to the lengths
    _check(counts, MOST_PROGRAMS)


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_fill_up(name: str, recorder: Recorder) -> None:
    counts = count(FAMILIES[name], WAYS["dynamic"], recorder, eager_programs, WINDOW_LENGTHS, WINDOW_TOKENS)
    assert counts.captures <= 8
    _check(counts, 13)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), DRAFTED)
def test_drafts(name: str, way: str, recorder: Recorder) -> None:
    counts = count(FAMILIES[name], WAYS[way], recorder, eager_programs, LENGTHS, WINDOW_TOKENS)
    assert counts.captures <= 8
    _check(counts, 20)


def test_lengths_of_a_scan_are_captured_together(recorder: Recorder) -> None:
    """Mamba scans its prompts: a capture for one alone, for a step, and for all up to 64."""
    counts = count(FAMILIES["mamba"], WAYS["dynamic"], recorder, eager_programs, (26, 8, 60, 31, 5, 44), NEW_TOKENS)
    assert counts.captures == 3
    _check(counts, 6)


def _check(counts: Counts, most: int) -> None:
    assert counts.wrong == 0
    assert 0 < counts.programs <= most
    assert not counts.exact_shapes
    assert not counts.last_captures
    assert counts.eager_ops == 0
