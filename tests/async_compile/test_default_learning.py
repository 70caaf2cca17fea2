"""Default buckets are planned on the CPU once padding has cost more than compiles; here these are said to cost nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

import dynaxla
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.runtime_state import process
from tests.async_compile.ended import until
from tests.async_compile.simulated import SimulatedPart
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("settled")
CALLS = 200
SIZES = (17, 33, 100)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile costs next to nothing, as far as plans are concerned."""
    monkeypatch.setattr(PartPrograms, "compile_s", property(lambda _: 1e-9, lambda *_: None), raising=False)


def function(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).softmax(0).cumsum(0)


def compiled(
    function: Callable[[torch.Tensor], torch.Tensor] = function, **options: object
) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend="dynaxla", dynamic=True, options=options)


def check(made: Callable[..., torch.Tensor], of: Callable[[torch.Tensor], torch.Tensor] = function) -> None:
    chance = random.Random(0)
    for _ in range(CALLS):
        x = torch.randn(chance.choice(SIZES))
        assert_close(made(x), of(x))


@torch.no_grad()
def test_paid_padding_is_planned_away(recorder: Recorder, cheap: None) -> None:
    made, before = compiled(), recorder.snapshot()
    check(made)
    until(lambda: process().compile_service.idle)
    assert recorder.snapshot().plans > before.plans
    with recorder.expect(compiles=0):
        check(made)


@torch.no_grad()
def test_a_compile_has_its_price(recorder: Recorder) -> None:
    with recorder.expect(plans=0):
        check(compiled())


@pytest.mark.parametrize("buckets", ["fixed", dynaxla.PowersOfTwo()])
@torch.no_grad()
def test_buckets_that_were_chosen_stay(buckets: object, recorder: Recorder, cheap: None) -> None:
    with recorder.expect(plans=0):
        check(compiled(buckets=buckets))


@torch.no_grad()
def test_results_that_have_to_be_the_same_each_time_are(recorder: Recorder, cheap: None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with recorder.expect(plans=0):
            check(compiled())
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_a_frozen_function_keeps_its_programs(recorder: Recorder, cheap: None) -> None:
    made = compiled()
    for size in SIZES:
        made(torch.randn(size))
    dynaxla.freeze(made)
    with recorder.expect(plans=0, compiles=0):
        check(made)


@torch.no_grad()
def test_a_part_that_no_child_can_compile_keeps_its_buckets(recorder: Recorder, cheap: None) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)).cumsum(0)

    made = compiled(branches)
    with recorder.expect(plans=0, jobs_here=0):
        check(made, branches)


def test_training_is_planned_too(recorder: Recorder, cheap: None) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).softmax(0)

    made, chance = torch.compile(layer, backend="dynaxla", dynamic=True), random.Random(0)
    before = recorder.snapshot()
    for _ in range(CALLS):
        x = torch.randn(chance.choice(SIZES), 4)
        (mine,) = torch.autograd.grad(made(x).square().sum(), weight)
        (eager,) = torch.autograd.grad(layer(x).square().sum(), weight)
        assert_close(mine, eager)
    until(lambda: process().compile_service.idle)
    assert recorder.snapshot().plans > before.plans


def test_sharded_parts_keep_their_buckets() -> None:
    part = SimulatedPart(1, behind=False)
    part.is_sharded = True
    for number in range(CALLS):
        part.call((SIZES[number % 3],))
    assert part.asked == 0


def test_a_forked_child_plans_for_itself() -> None:
    part = SimulatedPart(1, behind=False)
    part.learner._job = CompileJob(lambda: None, (), (), (), 0.0)  # never ended here: the parent's thread ends it
    pid = os.fork()
    if pid == 0:
        for number in range(CALLS):
            part.call((SIZES[number % 3],))
        os._exit(0 if part.asked else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for number in range(CALLS):
        part.call((SIZES[number % 3],))
    assert part.asked == 0
