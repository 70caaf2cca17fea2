"""Which job is next, which ones are dropped, and what is taken for cheaper."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest

from dynaxla.async_compile.job_queue import CompileJob, JobQueue
from dynaxla.async_compile.part_client import CostModel


class Part:
    """Something that may be gone."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def job(part: Part, size: int, clock: Clock, asked: int = 1) -> CompileJob:
    return CompileJob(weakref.ref(part), (size,), (size,), (), clock(), asked)


def test_the_most_wanted_goes_first() -> None:
    clock, part = Clock(), Part()
    jobs = JobQueue(clock)
    for size, asked in ((1, 1), (2, 3), (3, 3), (4, 2)):
        assert not jobs.add(job(part, size, clock, asked))
    awaited = job(part, 5, clock)
    awaited.awaited = True
    jobs.add(awaited)
    taken = [jobs.take()[0] for _ in range(5)]
    assert [each.key for each in taken if each is not None] == [(5,), (2,), (3,), (4,), (1,)]
    assert jobs.take() == (None, [])


def test_there_are_never_more_than_so_many() -> None:
    clock, part = Clock(), Part()
    jobs = JobQueue(clock, most=2)
    jobs.add(job(part, 1, clock, asked=2))
    jobs.add(job(part, 2, clock))
    clock.now = 1.0
    (dropped,) = jobs.add(job(part, 3, clock))
    assert (dropped.key, len(jobs)) == ((2,), 2)


def test_what_nobody_wants_any_more_is_dropped() -> None:
    clock, part, gone = Clock(), Part(), Part()
    jobs = JobQueue(clock, forgotten_s=60.0)
    jobs.add(job(part, 1, clock))
    jobs.add(job(gone, 2, clock))
    awaited = job(part, 3, clock)
    awaited.awaited = True
    jobs.add(awaited)
    del gone
    clock.now = 61.0
    taken, dropped = jobs.take()
    assert taken is awaited
    assert [each.key for each in dropped] == [(1,), (2,)]


def test_what_is_cheaper_is_decided_by_what_was_measured() -> None:
    costs = CostModel()
    assert costs.prefers_program((16,), 16, 8)
    assert not costs.prefers_program((16,), 16, 7), "nothing is known: at most twice the elements"
    for seconds in (9.0, 2.0, 3.0):  # the first is of getting ready
        costs.note_program((16,), seconds)
        costs.note_eager(8, seconds / 2)
    assert not costs.prefers_program((16,), 16, 8), "2 s against 1 s"
    costs.note_eager(4, 1.0)
    costs.note_eager(12, 3.0)
    assert costs.prefers_program((16,), 16, 12)
    assert costs.prefers_program((16,), 16, 24), "in proportion, above the largest size that was seen"
    assert not costs.prefers_program((16,), 16, 9)
    costs.on_evict((16,))
    assert costs.prefers_program((16,), 16, 8)


@pytest.mark.parametrize(("elements", "seconds"), [(1, 1.0), (10, 1.0), (15, 1.5), (20, 2.0), (40, 4.0)])
def test_eager_is_estimated_between_the_sizes_that_were_seen(elements: int, seconds: float) -> None:
    costs = CostModel()
    for _ in range(2):
        costs.note_eager(10, 1.0)
        costs.note_eager(20, 2.0)
        costs.note_program((1,), seconds)
        costs.note_program((2,), seconds * 1.01)
    assert costs.prefers_program((1,), 1, elements)
    assert not costs.prefers_program((2,), 1, elements)
