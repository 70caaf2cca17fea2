"""Measures a case: every way runs every input once and is checked; those that are right are timed in turn, round by round."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from dynaxla.bench.answers import Check, compare_answers, judge_by_float64
from dynaxla.bench.cases import Case, Prepare, Run
from dynaxla.bench.compile_counters import CompileCounters
from dynaxla.bench.records import BackendResult, CaseResult, StartTimes
from dynaxla.bucketing.shape_keys import EXACT, ShapeKey, ShapeKeys
from dynaxla.torch_api.dynamo import lift_capture_limits

LEAST_S = 0.002
"""A sample of a case with one input takes about as long or longer: shorter runs are repeated, and the sample is their mean."""

Tell = Callable[[float, str], object]
"""Is told which share of a case is done, and what comes next."""


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """Attributes:
    seconds: time for all samples of a case.
    rounds: samples of each way and input at least.
    most_rounds: at most.
    repeats: runs of a sample, of which it is the mean; 0: as `LEAST_S` says.
    warm: runs before the first sample, where there is one input; where there are several, the first pass is enough.
    """

    seconds: float = 5.0
    rounds: int = 5
    most_rounds: int = 1 << 30
    repeats: int = 0
    warm: int = 3


@dataclass(slots=True)
class _Way:
    """A way of a case, and what is known of it."""

    name: str
    run: Run
    check: Check = field(default_factory=lambda: Check("unchecked"))
    first_pass: list[tuple[float, CompileCounters]] = field(default_factory=list)
    samples_s: list[float] = field(default_factory=list)
    moved: CompileCounters = field(default_factory=CompileCounters)
    elements: list[tuple[int, int]] = field(default_factory=list)

    def time(self, number: int, repeats: int = 1) -> tuple[float, CompileCounters, Any]:
        """Mean seconds of a run, what was compiled meanwhile, and the results."""
        before, started = CompileCounters.read(), time.perf_counter()
        for _ in range(repeats):
            results = self.run(number)
        return (time.perf_counter() - started) / repeats, CompileCounters.read() - before, results

    def result(self) -> BackendResult:
        seconds = [taken for taken, _ in self.first_pass]
        all_of_it = sum((moved for _, moved in self.first_pass), CompileCounters())
        first = StartTimes(
            sum(seconds), all_of_it.split(sum(seconds)), all_of_it.compiled, all_of_it.loaded, all_of_it.graphs
        )
        return BackendResult(
            self.name,
            self.check,
            first if seconds else None,
            first_pass_s=seconds,
            programs=[moved.programs for _, moved in self.first_pass],
            samples_s=[] if self.check.is_bad else self.samples_s,
            recompiles=max(self.moved.programs, self.moved.graphs),
            elements=self.elements,
        )


def measure_case(case: Case, settings: TimingSettings, tell: Tell = lambda share, what: None) -> CaseResult:
    """Runs a case in this process; what the baseline raises reaches the caller.

    A way that raises, or whose results are not the baseline's, is not timed, and its check says so.
    """
    torch.compiler.reset()
    with lift_capture_limits():
        ways = {name: _Way(name, prepare()) for name, prepare in case.ways.items()}
        for number in range(len(case.inputs)):
            tell(0.5 * number / len(case.inputs), "first calls")
            _run_first(case, ways, number)
        right = {name: way for name, way in ways.items() if not way.check.is_bad}
        if case.settle is not None:
            case.settle({name: way.run for name, way in right.items()})
        groups = [right] if case.in_turn else [{name: way} for name, way in right.items()]
        for place, group in enumerate(groups):
            first, each = 0.5 + 0.5 * place / len(groups), 0.5 / len(groups)
            _Rounds(case, group, settings).run(partial(_tell_share, tell, first, each))
        if len(case.inputs) > 1:
            _count_elements(case, right)
    results = [way.result() for way in ways.values()]
    inputs = [dict(sizes) for sizes in case.inputs]
    return CaseResult(case.name, results, case.baseline, inputs, case.items, case.unit, case.about)


def _tell_share(tell: Tell, first: float, each: float, share: float) -> None:
    tell(first + each * share, "rounds")


def _run_first(case: Case, ways: Mapping[str, _Way], number: int) -> None:
    """Runs an input for the first time, each way with the same seed, and compares the results."""
    answers: dict[str, Any] = {}
    draws = False
    for name, way in ways.items():
        if way.check.is_bad:
            continue
        torch.manual_seed(number)
        try:
            seconds, moved, answers[name] = way.time(number)
        except Exception as error:  # a backend of anybody's, on a model of a user's
            if name == case.baseline:
                raise
            way.check = Check("failed", message=f"{type(error).__name__}: {error}"[:2000])
            continue
        draws |= name == case.baseline and _drew(number)
        way.first_pass.append((seconds, moved))
    if case.check != "never":
        _compare(case, ways, answers, number, draws=draws)


def _drew(seed: int) -> bool:
    """Whether torch's generator was used since it got this seed."""
    return not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())


def _compare(case: Case, ways: Mapping[str, _Way], answers: Mapping[str, Any], number: int, *, draws: bool) -> None:
    """Compares the results of an input of all ways with the baseline's, of which `draws` says whether they may be random."""
    expected = case.read(answers[case.baseline])
    for name in answers.keys() - {case.baseline}:
        given = case.read(answers[name])
        found = compare_answers(given, expected, case.tolerance)
        if found.status == "differs" and draws:
            found = Check("random", message="the baseline draws random numbers")
        elif found.status == "differs" and case.exact is not None and case.tolerance is None:
            found = judge_by_float64(found, given, expected, partial(_run_exact, case.exact, number))
        way = ways[name]
        worse = found.status == "random" or found.error > way.check.error
        if found.is_bad or way.check.status == "unchecked" or (way.check.status == "same" and worse):
            way.check = found


def _run_exact(prepare: Prepare, number: int) -> Any:
    return prepare()(number)


class _Rounds:
    """Times ways in turn, so that noise of the machine affects all alike."""

    def __init__(self, case: Case, ways: Mapping[str, _Way], settings: TimingSettings) -> None:
        self._case, self._ways, self._settings = case, dict(ways), settings

    def run(self, tell: Callable[[float], object]) -> None:
        settings = self._settings
        seconds = settings.seconds if self._case.in_turn else settings.seconds / len(self._case.ways)
        repeats = self._warm_up()
        gc.collect()
        started, rounds = time.perf_counter(), 0
        while rounds < settings.most_rounds and (rounds < settings.rounds or time.perf_counter() - started < seconds):
            for number in range(len(self._case.inputs)):
                self._sample(number, repeats)
            rounds += 1
            tell(min(1.0, max((time.perf_counter() - started) / max(seconds, 1e-9), rounds / settings.most_rounds)))

    def _warm_up(self) -> int:
        """Runs ways with one input a few times; gives how many runs of the fastest make a sample."""
        if len(self._case.inputs) > 1:
            return self._settings.repeats or 1
        warm_s = [min(way.time(0)[0] for _ in range(max(1, self._settings.warm))) for way in self._ways.values()]
        return self._settings.repeats or max(1, round(LEAST_S / max(min(warm_s), 1e-7)))

    def _sample(self, number: int, repeats: int) -> None:
        answers = {}
        for name, way in self._ways.items():
            seconds, moved, results = way.time(number, repeats)
            way.samples_s.append(seconds)
            way.moved += moved
            answers[name] = results
        if self._case.check == "always" and self._case.baseline in self._ways:
            _compare(self._case, self._ways, answers, number, draws=False)


def _count_elements(case: Case, ways: Mapping[str, _Way]) -> None:
    """Runs every input once more to see in which buckets the parts of a graph run it."""
    for way in ways.values():
        for number in range(len(case.inputs)):
            with _watch_buckets() as found:
                way.run(number)
            if found:
                true, padded = zip(*found, strict=True)
                way.elements.append((sum(true), sum(padded)))


@contextmanager
def _watch_buckets() -> Iterator[Sequence[tuple[int, int]]]:
    """The elements of each call of a part inside: of its sizes that vary, and of its bucket. Parts themselves count nothing."""
    found: list[tuple[int, int]] = []
    find_key = ShapeKeys.of

    def watch(keys: ShapeKeys, values: tuple[int, ...]) -> ShapeKey:
        key = find_key(keys, values)
        if values:
            true = keys.elements(values)
            scheme = None if key[:1] == (EXACT,) else keys.scheme_of(key)
            found.append((true, true if scheme is None else math.prod(scheme.spread(keys.bucket_of(key)))))
        return key

    with mock.patch.object(ShapeKeys, "of", watch):
        yield found
