"""Adaptive buckets: the sizes of a part's calls are counted, and buckets are planned from them in the background."""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.part_client import PartCompileClient
from dynaxla.async_compile.protocol import PaddingRefused, PlanReply, PlanRequest
from dynaxla.async_compile.service import CompileService
from dynaxla.bucket_policy import JointPolicy
from dynaxla.bucketing.bucket_planner import Plan
from dynaxla.bucketing.observed_sizes import MEMORY, MOST_SIZES, ObservedSizes, Values
from dynaxla.bucketing.shape_keys import ShapeKeys
from dynaxla.bucketing.size_buckets import BucketScheme
from dynaxla.cache.kinds import PLAN
from dynaxla.cache.store import Store
from dynaxla.errors import OptionError
from dynaxla.isolation.forking import notify_after_fork
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.programs.miss_policy import MissPolicy
from dynaxla.programs.outline_pickling import CannotSerialize
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program import Program
from dynaxla.programs.sharding_misses import RunProgram

logger = logging.getLogger("dynaxla")

KIND = PLAN.name

CALLS_PER_CHECK = 16
"""After so many calls it is looked at what they were, if their programs ran for `CHECK_SHARE` of the time of a compile."""

CHECK_SHARE = 0.25

MAX_BACKOFF = 4
"""After a plan that was not worth it more has to be padded until the next, up to so many times as much, as it would have
saved too little."""

MAX_DIMS = 2
"""So many sizes that differ are planned together."""

_LIMITS = Limits(300.0, 4 << 30)


@dataclass(frozen=True, slots=True)
class TiedDimsPlan(JointPolicy):
    """A plan in which sizes that were equal in every call, as the sides of images may be, take the bucket of their largest.

    Attributes:
        plan: of one dim, or of two.
        dims: for each size its dim in the plan.
    """

    plan: Plan
    dims: tuple[int, ...]

    def bucket(self, *sizes: int) -> tuple[int, ...]:
        largest = [0] * len(self.plan.cells[0])
        for size, dim in zip(sizes, self.dims, strict=True):
            largest[dim] = max(largest[dim], size)
        buckets = self.plan.bucket(*largest)
        return tuple(size if size <= 1 else buckets[dim] for size, dim in zip(sizes, self.dims, strict=True))

    @property
    def cells(self) -> list[tuple[int, ...]]:
        """The plan's, with a bound for each size."""
        return [tuple(cell[dim] for dim in self.dims) for cell in self.plan.cells]

    def to_json(self) -> str:
        return json.dumps({"plan": self.plan.to_json(), "dims": self.dims})

    @classmethod
    def from_json(cls, text: str) -> TiedDimsPlan:
        """Raises OptionError where the text is something else."""
        try:
            document = json.loads(text)
            made = cls(Plan.from_json(document["plan"]), tuple(document["dims"]))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"this is not a plan: {error}", "delete it") from error
        if set(made.dims) != set(range(len(made.plan.cells[0]))):
            raise OptionError("the plan has other dims", "delete it")
        return made


class AdaptiveBuckets:
    """Counts the sizes of one part's calls, has them planned in a child, and has the plan's programs made there.

    Any thread may count; a call that two threads count at once may be lost to the counts.

    Args:
        client: asks for the programs.
        keys: take the plan.
        policy: of the function that is being called; one that compiles nothing plans nothing.
        compile_s: the seconds of a compile that a cell has to save; 0 where seconds do not count.
        capacity: cells of a plan at most.
        name: of the part in the store.
        store: where plans are kept for later processes; None: nowhere.
    """

    limits = _LIMITS

    def __init__(
        self,
        client: PartCompileClient,
        keys: ShapeKeys,
        service: CompileService,
        recorder: Recorder,
        *,
        policy: Callable[[], MissPolicy],
        compile_s: Callable[[], float],
        capacity: int,
        name: str | None,
        store: Store | None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._service = service
        self._recorder = recorder
        self._policy = policy
        self._compile_s = compile_s
        self._capacity = capacity
        self._store = None if name is None else store
        self._name = PLAN.key(part=name)
        self._traffic = ObservedSizes()
        self._recent: list[Values] = []
        self._run_s = 0.0
        self._stays = False
        self._backoff = 1.0
        self._job: CompileJob | None = None
        self._plan: BucketScheme | None = None
        self._dims: tuple[int, ...] = ()
        self._element_counts: dict[tuple[int, Values], tuple[int, int]] = {}
        self._load_plan()
        notify_after_fork(self)

    def after_fork(self) -> None:
        """A plan that was under way is the parent's."""
        self._job = None

    @classmethod
    def of(
        cls,
        programs: PartPrograms,
        client: PartCompileClient,
        service: CompileService,
        policy: Callable[[], MissPolicy],
    ) -> AdaptiveBuckets:
        """The buckets of a compiled part. A quarter of its programs is left to sizes that no plan has."""
        pipeline = programs.compiler.pipeline
        return cls(
            client,
            programs.keys,
            service,
            pipeline.recorder,
            policy=policy,
            compile_s=lambda: programs.compile_s,
            capacity=max(1, pipeline.options.max_executables * 3 // 4),
            name=programs.compiler.graphs.name,
            store=pipeline.executables.store,
        )

    def measure(self, run: RunProgram) -> RunProgram:
        """A function that runs programs as `run` does, and counts the seconds."""
        clock = time.perf_counter

        def measured(program: Program, values: Values, args: Any) -> list[Any]:
            started = clock()
            results = run(program, values, args)
            self._run_s += clock() - started
            return results

        return measured

    def on_call(self, values: Values, is_hit: bool) -> None:
        """Counts a call."""
        recent = self._recent
        recent.append(values)
        if len(recent) < CALLS_PER_CHECK:
            return
        if self._run_s >= CHECK_SHARE * self._compile_s() or len(recent) >= MEMORY:
            self._recent, run_s, self._run_s = [], self._run_s, 0.0
            scheme = self._keys.scheme
            if (
                scheme is not None
                and not self._stays
                and self._policy().compiles_graphs
                and not self._client.is_sharded
            ):
                self._check(scheme, Counter(recent), run_s)

    def _check(self, scheme: BucketScheme, recent: Counter[Values], run_s: float) -> None:
        """Has the sizes planned once that is due."""
        traffic, compile_s = self._traffic, self._compile_s()
        calls = {values: (count, *self._elements(scheme, values)) for values, count in recent.items()}
        traffic.add(calls, run_s, compile_s)
        due = traffic.wasted >= self._backoff * traffic.plan_price(compile_s)
        if due and (self._job is None or self._job.ended.is_set()) and self._tied_sizes(scheme) is not None:
            traffic.wasted = 0.0
            self._job = CompileJob(weakref.ref(self), (), (), (), time.monotonic(), awaited=True)
            self._service.submit(self._job)

    def _elements(self, scheme: BucketScheme, values: Values) -> tuple[int, int]:
        """The true elements of a call, and those of its bucket; remembered where a plan says them."""
        known = self._element_counts.get((scheme.count, values))
        if known is None:
            known = math.prod(scheme.sizes_of(values)), math.prod(self._bucket(scheme, self._plan, values))
            if _holds(self._plan, values) and len(self._element_counts) < MOST_SIZES:
                self._element_counts[scheme.count, values] = known
        return known

    # What the child is asked, and what becomes of its answer

    def load(self, job: CompileJob) -> bool:
        """Ends the job where no child could compile the plan's programs: such a part keeps its buckets."""
        try:
            self._client.check_serializable()
        except CannotSerialize:
            self._stays = True
        return self._stays

    def request(self, job: CompileJob, whole: bool) -> PlanRequest:
        """Raises CannotSerialize where there is nothing to plan any more."""
        scheme = self._keys.scheme
        found = None if scheme is None else self._tied_sizes(scheme)
        if scheme is None or found is None:
            raise CannotSerialize("there is nothing to plan any more")
        self._dims, counts = found
        powers = tuple(self._dims.count(dim) for dim in sorted(set(self._dims)))
        price = self._traffic.cell_price(self._compile_s())
        return PlanRequest(counts, frozenset(self._compiled_cells(scheme)), self._capacity, powers, price)

    def accept(self, job: CompileJob, reply: PlanReply) -> bool:
        """Takes a plan that is worth it; whether it was."""
        scheme = self._keys.scheme
        policy = TiedDimsPlan(Plan.from_json(reply.plan), self._dims)
        if scheme is None or scheme.count != len(policy.dims):
            return False  # sizes that were equal in every call were not, meanwhile
        plan = scheme.replace_plan(policy.cells, policy)
        needed = self._traffic.plan_price(self._compile_s())
        saved = self._padded(scheme, self._plan) - self._padded(scheme, plan)
        if saved < needed:
            self._backoff = min(needed / max(saved, 1.0), MAX_BACKOFF)
            return False
        self._backoff = 1.0
        self._change(plan)
        if self._store is not None:
            self._store.put(KIND, self._name, policy.to_json().encode(), {"cells": len(policy.cells)})
        return True

    def refuse(self, job: CompileJob, refusal: PaddingRefused) -> None:
        """No plan is refused."""

    def compile_here(self, job: CompileJob, why: str) -> None:
        """A plan is always made by a child."""

    def end(self, job: CompileJob, *, again: bool) -> None:
        job.ended.set()

    def _change(self, plan: BucketScheme) -> None:
        """Has the programs of a plan made, the most wanted first; each is used from when it is there."""
        counts = self._traffic.counts
        cells: dict[tuple[int, ...], list[Values]] = {}
        for values in counts:
            if _holds(plan, values):
                cells.setdefault(plan.bucket(values), []).append(values)
        self._plan, self._element_counts, self._traffic.wasted = plan, {}, 0.0
        tag = self._keys.plan(plan)
        self._recorder.add(plans=1)
        logger.info("sizes were planned anew: %d buckets", len(cells))
        self._client.expire_unneeded()
        for cell, of in cells.items():
            lacking = [values for values in of if self._keys.is_missing_cell(values)]
            if lacking:
                calls = math.ceil(sum(counts[values] for values in lacking))
                self._client.ask((tag, *cell), lacking[0], (), calls=calls)

    def _tied_sizes(self, scheme: BucketScheme) -> tuple[tuple[int, ...], dict[tuple[int, ...], float]] | None:
        """The dim of each class in a plan, and how many calls had which sizes of these dims; None for none."""
        calls = [(scheme.sizes_of(values), count) for values, count in self._traffic.counts.items()]
        columns = list(zip(*(sizes for sizes, _ in calls), strict=True))
        dims = tuple(list(dict.fromkeys(columns)).index(column) for column in columns)
        if not 1 <= len(set(dims)) <= MAX_DIMS:
            return None
        found: dict[tuple[int, ...], float] = {}
        for sizes, count in calls:
            if max(sizes) > 1 and min(sizes) > 0:
                planned = tuple(sizes[dims.index(dim)] for dim in sorted(set(dims)))
                found[planned] = found.get(planned, 0) + count
        return (dims, found) if found else None

    def _compiled_cells(self, scheme: BucketScheme) -> set[tuple[int, ...]]:
        """The buckets whose programs are there or are made for a plan, as cells of a plan."""
        dims = self._dims
        calls = [values for values in self._traffic.counts if _holds(self._plan, values) or self._keys.has(values)]
        buckets = {self._bucket(scheme, self._plan, values) for values in calls}
        cells = {bucket: tuple(bucket[dims.index(dim)] for dim in sorted(set(dims))) for bucket in buckets}
        return {cell for bucket, cell in cells.items() if max(cell) > 1 and bucket == tuple(cell[dim] for dim in dims)}

    def _padded(self, scheme: BucketScheme, plan: BucketScheme | None) -> float:
        """The padded elements of all calls that are counted, under a plan."""
        counts = self._traffic.counts
        return sum(math.prod(self._bucket(scheme, plan, values)) * count for values, count in counts.items())

    def _bucket(self, scheme: BucketScheme, plan: BucketScheme | None, values: Values) -> tuple[int, ...]:
        """The sizes of the classes under a plan, where it covers them as if all of its programs were there."""
        if plan is not None and plan.fits(values):
            bucket = plan.bucket(values)
            if bucket in plan.cells:
                return scheme.sizes_of(plan.spread(bucket))
        key = self._keys.of(values)
        of = self._keys.scheme_of(key)
        return scheme.sizes_of(values if of is None else of.spread(self._keys.bucket_of(key)))

    # What is kept for later processes

    def _load_plan(self) -> None:
        data = None if self._store is None else self._store.get(KIND, self._name)
        scheme = self._keys.scheme
        if self._store is None or data is None or scheme is None:
            return
        try:
            policy = TiedDimsPlan.from_json(data.decode(errors="replace"))
        except OptionError:
            self._store.reject(KIND, self._name)
            return
        if len(policy.dims) == scheme.count and len(policy.cells) <= self._capacity:
            self._plan = scheme.replace_plan(policy.cells, policy)
            self._keys.plan(self._plan)


def _holds(plan: BucketScheme | None, values: Values) -> bool:
    """Whether a plan has a cell for these."""
    return plan is not None and plan.fits(values) and plan.covers(values)
