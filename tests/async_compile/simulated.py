"""A part whose calls are counted and planned from, without a model, a child or a compiler: thousands of calls in a second."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from dynaxla.async_compile.adaptive_buckets import AdaptiveBuckets
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import PlanReply
from dynaxla.bucket_policy import DEFAULT
from dynaxla.bucketing.bucket_planner import extend_plan
from dynaxla.bucketing.joint_policy import JOINT
from dynaxla.bucketing.shape_keys import ShapeKey, ShapeKeys
from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource, SymbolPolicies
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.miss_policy import CompileInCall

Values = tuple[int, ...]
Draw = Callable[[random.Random, int], Values]
"""The sizes of a call, by its number."""

MOST = 64  # the default of max_executables
CALLS_PER_PROGRAM = 8
ELEMENT_S = 50e-6
CHANGE = 2000

B, S, T = sympy.symbols("b s t", integer=True, positive=True)
INPUTS = {1: (1, S), 2: (B, S), 3: (B, 3, S, T)}


def scheme(count: int) -> BucketScheme:
    """Of a length, of a batch of lengths, or of a batch of images."""
    symbols = (S,) if count == 1 else (B, S, T)[:count]
    sources = tuple(SizeSource(place, None) for place in range(count))
    policies = SymbolPolicies(DEFAULT, JOINT, shapes=(INPUTS[count],))
    return BucketScheme.initial(symbols, sources, (None,) * count, policies)


class SimulatedPart:
    """Keeps programs as `CompiledPart` does; is what the learner asks for plans and for programs, too.

    Args:
        compile_s: the price of a compile, where an element takes `ELEMENT_S`; 0: seconds do not count.

    Attributes:
        programs: those that are there.
        made: how many were ever made.
        plans: after how many calls each plan was taken.
        asked: how many plans were asked for.
    """

    def __init__(self, sizes: int, behind: bool, compile_s: float = 0.0) -> None:
        self.programs: OrderedDict[ShapeKey, None] = OrderedDict()
        self.keys = ShapeKeys((), scheme(sizes), self.programs.keys)
        self.made = 0
        self.plans: list[int] = []
        self.asked = 0
        self._behind = behind
        self._calls = 0
        self._work = 0
        self._waiting: dict[ShapeKey, tuple[Values, int]] = {}
        most = MOST * 3 // 4
        self.learner = AdaptiveBuckets(
            self,  # type: ignore[arg-type]
            self.keys,
            _Planner(self),  # type: ignore[arg-type]
            Recorder(),
            policy=CompileInCall,
            compile_s=lambda: compile_s,
            capacity=most,
            name=None,
            store=None,
        )

    def call(self, values: Values) -> None:
        self._calls += 1
        key = self.keys.of(values)
        self.learner.on_call(values, key in self.programs)
        if key in self.programs:
            self.programs.move_to_end(key)
            self.learner._run_s += ELEMENT_S * self._padded(values)
        elif self._behind:
            self.ask(key, values, ())
        else:
            self._make(key)
        self._pass()

    def padded_ratio(self, calls: Sequence[Values]) -> float:
        return sum(self._padded(values) for values in calls) / sum(map(math.prod, calls))

    def wasted(self, calls: Sequence[Values]) -> int:
        """Padding, in elements."""
        return sum(self._padded(values) - math.prod(values) for values in calls)

    # What the learner asks for

    is_sharded = False

    def check_serializable(self) -> None:
        """Everything can be compiled elsewhere."""

    def ask(self, key: ShapeKey, values: Values, args: Sequence[Any], calls: int = 1) -> None:
        first, before = self._waiting.get(key, (values, 0))
        self._waiting[key] = first, before + calls

    def expire_unneeded(self) -> None:
        self._waiting = {key: job for key, job in self._waiting.items() if self.keys.of(job[0]) == key}

    def plan(self, job: CompileJob) -> None:
        self.asked += 1
        request = self.learner.request(job, whole=False)
        plan = extend_plan(request.counts, request.have, request.most, request.powers, request.price)
        if self.learner.accept(job, PlanReply(plan.to_json())):
            self.plans.append(self._calls)

    def _pass(self) -> None:
        """Time passes: programs are made one at a time."""
        self._work = self._work + 1 if self._waiting else 0
        if self._work == CALLS_PER_PROGRAM:
            self._work = 0
            key = max(self._waiting, key=lambda key: self._waiting[key][1])
            values, _ = self._waiting.pop(key)
            if self.keys.takes(key, values):
                self._make(key)

    def _make(self, key: ShapeKey) -> None:
        self.made += 1
        self.programs[key] = None
        if len(self.programs) > MOST:
            self.programs.popitem(last=False)
        for superseded_keys in self.keys.superseded_keys():
            self.programs.pop(superseded_keys, None)
        self.keys.renew()

    def _padded(self, values: Values) -> int:
        key = self.keys.of(values)
        of = self.keys.scheme_of(key)
        return math.prod(values if of is None else of.spread(self.keys.bucket_of(key)))


class _Planner:
    """Answers at once."""

    def __init__(self, part: SimulatedPart) -> None:
        self._part = part

    def submit(self, job: CompileJob) -> None:
        self._part.plan(job)
        self._part.learner.end(job, again=True)


# What comes


def length(chance: random.Random, middle: float, most: int = 512) -> int:
    return min(max(round(math.exp(chance.gauss(math.log(middle), 0.9))), 4), most)


def lengths(chance: random.Random, number: int) -> Values:
    return (length(chance, 60),)


def batches(chance: random.Random, number: int) -> Values:
    return (chance.randint(2, 8), length(chance, 60))


def two_kinds(chance: random.Random, number: int) -> Values:
    middle, spread = (30, 6) if chance.random() < 0.7 else (300, 40)
    return (chance.randint(2, 8), max(4, round(chance.gauss(middle, spread))))


def few_sizes(chance: random.Random, number: int) -> Values:
    return (chance.choice((2, 4, 8)), chance.choice((20, 77, 130, 384)))


def even(chance: random.Random, number: int) -> Values:
    return (chance.randint(2, 8), chance.randint(4, 512))


def one_batch_mostly(chance: random.Random, number: int) -> Values:
    """The batch of one is a part of its own; of the other one nearly all calls have the same batch."""
    return (2 if chance.random() < 0.9 else chance.randint(3, 8), length(chance, 60))


def images(chance: random.Random, number: int) -> Values:
    side = min(max(round(math.exp(chance.gauss(math.log(40), 0.9))), 16), 96)
    return (chance.randint(2, 8), side, side)


def changing(chance: random.Random, number: int) -> Values:
    """Lengths that are four times as long from one call on."""
    return (chance.randint(2, 8), length(chance, 60) if number < CHANGE else length(chance, 250, 1024))


def again_and_again(draw: Draw, count: int, seed: int) -> Draw:
    """The same calls in every pass, as of a benchmark."""
    chance = random.Random(seed)
    calls = [draw(chance, number) for number in range(count)]
    return lambda chance, number: calls[number % count]
