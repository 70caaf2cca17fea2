"""Buckets that are planned from the sizes of the calls: right at every moment, bounded, and known to the next process."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla import backend
from dynaxla.bucketing.bucket_planner import Plan, extend_plan
from dynaxla.cache.store import Store
from dynaxla.dispatch import CompiledPart
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime_state import process
from tests.async_compile.ended import until
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("settled")
SIZES = (17, 33, 100)
FIRST_PLAN = 64
"""After so many calls such sizes have been planned."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[CompiledPart]:
    """Those that are made."""
    made: list[CompiledPart] = []
    init = CompiledPart.__init__

    def watched(self: CompiledPart, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(CompiledPart, "__init__", watched)
    return made


def function(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).softmax(0).cumsum(0)


def learning(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(function, backend="dynaxla", dynamic=True, options={"buckets": "learned", **options})


def check(compiled: Callable[[torch.Tensor], torch.Tensor], sizes: list[int]) -> None:
    for size in sizes:
        x = torch.randn(size)
        assert_close(compiled(x), function(x))


def mixed(count: int, sizes: tuple[int, ...] = SIZES) -> list[int]:
    chance = random.Random(0)
    return [chance.choice(sizes) for _ in range(count)]


@pytest.mark.parametrize("mode", ["now", "behind"])
@torch.no_grad()
def test_sizes_are_planned_from_what_comes(mode: str, recorder: Recorder, parts: list[CompiledPart]) -> None:
    compiled = learning(compile=mode)
    with recorder.expect(plans=1):
        check(compiled, mixed(FIRST_PLAN))
        until(lambda: process().compile_service.idle)
    with recorder.expect(compiles=0, plans=0):
        check(compiled, [*SIZES, 2, 16, 18, 32, 34, 99])
    ready = [key[1:] or key for key in sorted(parts[0]._programs, key=max)]
    assert ready[:3] == [(17,), (33,), (100,)]
    if mode == "now":
        assert ready[3:] == [(128,)], "of what was there before that stays which is for more than the plan's sizes"
        with recorder.expect(compiles=1):
            check(compiled, [300, 370])  # of one bucket of the default: no cell covers them


@torch.no_grad()
def test_every_number_is_right_while_buckets_change(recorder: Recorder) -> None:
    compiled = learning(compile="behind")
    with recorder.expect(jobs_failed=0):
        check(compiled, mixed(4 * FIRST_PLAN, tuple(range(2, 24))))


@torch.no_grad()
def test_a_plan_has_no_more_programs_than_are_kept(recorder: Recorder, parts: list[CompiledPart]) -> None:
    compiled = learning(max_executables=4)
    check(compiled, mixed(FIRST_PLAN, (5, 9, 17, 33, 60)))
    until(lambda: process().compile_service.idle)
    check(compiled, mixed(FIRST_PLAN // 2, (5, 9, 17, 33, 60, 70)))
    assert len(parts[0]._programs) <= 4


@torch.no_grad()
def test_the_next_process_begins_with_the_plan(
    recorder: Recorder, parts: list[CompiledPart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dataclasses.replace(process(), executables=ExecutableCache(Store(tmp_path)))
    monkeypatch.setattr(backend, "process", lambda: own)
    check(learning(), mixed(FIRST_PLAN))
    until(lambda: own.compile_service.idle)
    torch._dynamo.reset()
    check(learning(), [20, 30])
    assert [key[1:] for key in parts[-1]._programs] == [(33,)]


@torch.no_grad()
def test_sides_that_are_always_equal_are_planned_as_one(recorder: Recorder, parts: list[CompiledPart]) -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(3).amax((2, 3))

    compiled = torch.compile(pooled, backend="dynaxla", options={"buckets": "learned", "compile": "behind"})
    chance, marked = random.Random(0), torch.randn(3, 3, 9, 9)
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(marked, dim)
    compiled(marked)
    for _ in range(FIRST_PLAN):
        side = chance.choice((9, 17, 33))
        x = torch.randn(chance.choice((3, 5)), 3, side, side)
        assert_close(compiled(x), pooled(x))
    until(lambda: process().compile_service.idle)
    with recorder.expect(compiles=0, served_own=2):
        for shape in ((5, 3, 33, 33), (4, 3, 30, 20)):
            x = torch.randn(shape)
            assert_close(compiled(x), pooled(x))
    assert (5, 33, 33) in {tuple(sorted(key[1:])) for key in parts[0]._programs}


def test_a_plan_has_as_few_cells_as_will_do() -> None:
    assert extend_plan({(10,): 300, (20,): 100}, (), 48, (1,)).cells == ((10,), (20,))
    many = {(size,): 10 for size in range(2, 200)}
    assert 8 <= extend_plan(many, (), 48, (1,)).executables <= 32
    assert extend_plan(many, (), 4, (1,)).executables == 4


def lengths(count: int, seed: int, middle: float) -> Counter[tuple[int, ...]]:
    chance = random.Random(seed)
    drawn = [(chance.randint(1, 8), round(math.exp(chance.gauss(math.log(middle), 0.9))) + 1) for _ in range(count)]
    return Counter(drawn)


def padded(seen: Counter[tuple[int, ...]], plan: Plan) -> float:
    elements = sum(math.prod(sizes) * count for sizes, count in seen.items())
    return sum(math.prod(plan.bucket(*sizes)) * count for sizes, count in seen.items()) / elements


def test_later_plans_add_to_those_before() -> None:
    seen = lengths(250, 0, 60)
    first = set(extend_plan(seen, (), 100, (1, 1)).cells)
    seen.update(lengths(250, 1, 60))
    later = extend_plan(seen, first, 100, (1, 1))
    assert first < set(later.cells)
    assert padded(seen, later) < padded(seen, Plan(tuple(cell for cell in later.cells if cell in first)))


def test_where_there_is_no_room_better_cells_take_the_place_of_those_there_are() -> None:
    before = extend_plan(lengths(1000, 0, 20), (), 48, (1, 1)).cells
    changed = lengths(1000, 1, 200)
    after = extend_plan(changed, before, 48, (1, 1))
    assert len(after.cells) <= 48
    assert padded(changed, after) <= 1.1 * padded(changed, extend_plan(changed, (), 48, (1, 1)))
    assert extend_plan(changed, lengths(100, 2, 200), 8, (1, 1)).executables <= 8


def test_a_size_that_is_twice_a_factor_weighs_more() -> None:
    seen = {(2, 10): 100, (4, 10): 100, (2, 20): 100, (4, 20): 100}
    assert extend_plan(seen, (), 2, (1, 2)).cells == ((4, 10), (4, 20))
    assert extend_plan(seen, (), 2, (2, 1)).cells == ((2, 20), (4, 20))
