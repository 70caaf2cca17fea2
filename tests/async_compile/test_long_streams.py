"""Buckets that learn over thousands of calls: few programs, little padding, and rest. Nothing is compiled here."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tests.async_compile import simulated
from tests.async_compile.simulated import Draw, SimulatedPart, again_and_again

CALLS = 4000


@dataclass(frozen=True)
class Stream:
    """What comes, and what is to become of it.

    Attributes:
        draw: the sizes of a call.
        made: programs at most, those of the default buckets included.
        ratio: padded elements per true element at the end, at most, of calls that are drawn anew.
        rest: after so many calls no plan is taken any more.
    """

    name: str
    draw: Draw
    made: int
    ratio: float
    rest: int


STREAMS = [
    Stream("lengths", simulated.lengths, 26, 1.12, 500),
    Stream("batches", simulated.batches, 56, 1.27, 1500),
    Stream("two kinds", simulated.two_kinds, 45, 1.17, 2000),
    Stream("few sizes", simulated.few_sizes, 20, 1.05, 300),
    Stream("even", simulated.even, 50, 1.2, 2000),
    Stream("one batch mostly", simulated.one_batch_mostly, 56, 1.18, 1500),
    Stream("again and again", again_and_again(simulated.batches, 173, 0), 44, 1.16, 400),
    Stream("rarely, again and again", again_and_again(simulated.lengths, 27, 0), 20, 1.06, 200),
    Stream("images, again and again", again_and_again(simulated.images, 175, 0), 40, 1.15, 600),
]


def run(part: SimulatedPart, draw: Draw, chance: random.Random, calls: range) -> None:
    for number in calls:
        part.call(draw(chance, number))


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_stream_comes_to_rest(stream: Stream) -> None:
    part, chance = SimulatedPart(len(stream.draw(random.Random(0), 0)), behind=True), random.Random(0)
    run(part, stream.draw, chance, range(CALLS))
    later = [stream.draw(chance, CALLS + number) for number in range(1000)]
    assert part.made <= stream.made
    assert part.padded_ratio(later) <= stream.ratio
    assert part.plans
    assert part.plans[-1] <= stream.rest
    assert part.asked <= 30


def test_programs_made_in_the_calls_are_few_too() -> None:
    part = SimulatedPart(2, behind=False)
    run(part, simulated.batches, random.Random(0), range(1500))
    assert part.made <= simulated.MOST


def test_a_stream_that_changes_is_followed() -> None:
    part, chance = SimulatedPart(2, behind=True), random.Random(0)
    run(part, simulated.changing, chance, range(simulated.CHANGE))
    made = part.made
    run(part, simulated.changing, chance, range(simulated.CHANGE, simulated.CHANGE + 2000))
    after = [simulated.changing(chance, simulated.CHANGE) for _ in range(1000)]
    assert part.padded_ratio(after) <= 1.27
    assert part.made - made <= 40
    assert part.plans[-1] <= simulated.CHANGE + 1500


def test_what_is_not_padded_is_not_planned() -> None:
    part = SimulatedPart(2, behind=True)
    run(part, lambda chance, number: (4, 64 if number % 2 else 128), random.Random(0), range(1000))
    assert part.asked == 0
    assert part.made == 2


def test_by_default_a_compile_has_to_have_been_paid_by_padding() -> None:
    compile_s, draw = 0.75, again_and_again(simulated.batches, 200, 0)
    part, chance = SimulatedPart(2, behind=False, compile_s=compile_s), random.Random(0)
    calls, seconds = [draw(chance, number) for number in range(200)], []
    while not part.plans:
        run(part, draw, chance, range(200))
        seconds.append(simulated.ELEMENT_S * part.wasted(calls))
        assert len(seconds) < 20
    before, programs = sum(seconds), part.made
    assert before >= compile_s, "a plan before its compiles were worth it"
    for _ in range(35):
        run(part, draw, chance, range(200))
        seconds.append(simulated.ELEMENT_S * part.wasted(calls))
    assert part.padded_ratio(calls) <= 1.2
    assert (part.made - programs) * compile_s <= sum(seconds), "more was spent on compiles than on padding"


def test_by_default_short_calls_are_not_planned() -> None:
    part = SimulatedPart(2, behind=False, compile_s=1e4)
    run(part, simulated.batches, random.Random(0), range(CALLS))
    assert part.asked == 0
