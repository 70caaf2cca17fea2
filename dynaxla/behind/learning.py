"""Buckets that learn: the sizes of a part's calls are counted, and planned from behind the calls."""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from dynaxla.behind.cells import work
from dynaxla.behind.compiler import Behind
from dynaxla.behind.jobs import Job
from dynaxla.behind.shipping import CannotShip, NotPadded, Planned, PlanRequest
from dynaxla.behind.wants import Wants
from dynaxla.bucketing.keys import Keys
from dynaxla.bucketing.planning import Plan
from dynaxla.bucketing.sizing import Sizing
from dynaxla.cache.key import Key as StoreKey
from dynaxla.cache.store import Store
from dynaxla.errors import OptionError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.policy import JointPolicy
from dynaxla.stages import TensorSpec

logger = logging.getLogger("dynaxla")

KIND = "plan"

FIRST_PLAN = 64
"""After so many calls the sizes are planned for the first time, and then each time that there are twice as many."""

OFTEN = 1024
"""But after so many calls at the latest; of those before, each counts half then, so that a stream that changes is followed."""

WORTH = 0.95
"""A plan is taken that leaves at most this share of the padded elements there are without it."""

MOST_SIZES = 4096
"""So many different sizes are counted; with more of them single ones say little."""

MOST_DIMS = 2
"""So many sizes that differ are planned together."""

_FORGOTTEN = 0.2  # less than this counts for nothing

_LIMITS = Limits(300.0, 4 << 30)


@dataclass(frozen=True, slots=True)
class Together(JointPolicy):
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
    def from_json(cls, text: str) -> Together:
        """Raises OptionError where the text is something else."""
        try:
            document = json.loads(text)
            made = cls(Plan.from_json(document["plan"]), tuple(document["dims"]))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"this is not a plan: {error}", "delete it") from error
        if set(made.dims) != set(range(len(made.plan.cells[0]))):
            raise OptionError("the plan has other dims", "delete it")
        return made


class Learner:
    """Counts the sizes of one part's calls, has them planned in a child, and has the plan's programs made there.

    Any thread may count; a call that two threads count at once may be lost to the counts.

    Args:
        wants: asks for the programs.
        keys: take the plan.
        most: cells of a plan.
        graph: names the part in the store.
        store: where plans are kept for later processes; None: nowhere.
    """

    limits = _LIMITS

    def __init__(
        self,
        wants: Wants,
        keys: Keys,
        behind: Behind,
        recorder: Recorder,
        most: int,
        graph: Graph,
        store: Store | None,
    ) -> None:
        self._wants = wants
        self._keys = keys
        self._behind = behind
        self._recorder = recorder
        self._most = most
        self._store = store
        self._name = StoreKey.of(graph=_listing(graph))
        self._counts: dict[tuple[int, ...], float] = {}
        self._calls = 0
        self._due = FIRST_PLAN
        self._dims: tuple[int, ...] = ()
        self._recall()

    def count(self, values: tuple[int, ...]) -> None:
        """Counts a call."""
        counts = self._counts
        if values in counts or len(counts) < MOST_SIZES:
            counts[values] = counts.get(values, 0) + 1
        self._calls += 1
        if self._calls >= self._due:
            self._due += min(self._due, OFTEN)
            if self._calls > OFTEN:
                self._counts = {values: each / 2 for values, each in list(counts.items()) if each > _FORGOTTEN}
            sizing = self._keys.sizing
            if sizing is not None and self._planned(sizing) is not None:
                self._behind.ask(Job(weakref.ref(self), (), (), (), time.monotonic(), awaited=True))

    # What the child is asked, and what becomes of its answer

    def request(self, job: Job, whole: bool) -> PlanRequest:
        sizing = self._keys.sizing
        found = None if sizing is None else self._planned(sizing)
        if sizing is None or found is None:
            raise CannotShip("there is nothing to plan any more")
        self._dims, counts = found
        return PlanRequest(counts, frozenset(self._have(sizing)), self._most)

    def take(self, job: Job, reply: Planned) -> bool:
        """Takes a plan that is worth it; whether it was."""
        sizing = self._keys.sizing
        policy = Together(Plan.from_json(reply.plan), self._dims)
        if sizing is None or sizing.count != len(policy.dims):
            return False  # sizes that were equal in every call were not, meanwhile
        made, counts = sizing.planned(policy.cells, policy), dict(self._counts)
        if work(
            counts, lambda values: made.spread(made.bucket(values)) if made.fits(values) else values
        ) > WORTH * work(counts, self._bucket):
            return False
        self._change(made, counts)
        if self._store is not None:
            self._store.put(KIND, self._name, policy.to_json().encode(), {"cells": len(policy.cells)})
        return True

    def refuse(self, job: Job, refusal: NotPadded) -> None:
        """No plan is refused."""

    def make_here(self, job: Job, why: str) -> None:
        """A plan is always made by a child."""

    def end(self, job: Job, *, again: bool) -> None:
        job.ended.set()

    def _change(self, sizing: Sizing, counts: dict[tuple[int, ...], float]) -> None:
        """Has the programs of a plan made, the most wanted first; each is used from when it is there."""
        cells: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for values in counts:
            if sizing.fits(values) and sizing.covers(values):
                cells.setdefault(sizing.bucket(values), []).append(values)
        tag = self._keys.plan(sizing)
        self._recorder.add(plans=1)
        logger.info("sizes were planned anew: %d buckets", len(cells))
        for cell, of in cells.items():
            lacking = [values for values in of if self._keys.lacks((tag, *cell), values)]
            if lacking:
                calls = math.ceil(sum(counts[values] for values in lacking))
                self._wants.ask((tag, *cell), lacking[0], (), calls=calls)

    def _planned(self, sizing: Sizing) -> tuple[tuple[int, ...], dict[tuple[int, ...], float]] | None:
        """The dim of each class in a plan, and how many calls had which sizes of these dims; None for none."""
        calls = [(sizing.sizes_of(values), count) for values, count in list(self._counts.items())]
        columns = list(zip(*(sizes for sizes, _ in calls), strict=True))
        dims = tuple(list(dict.fromkeys(columns)).index(column) for column in columns)
        if not 1 <= len(set(dims)) <= MOST_DIMS:
            return None
        found: dict[tuple[int, ...], float] = {}
        for sizes, count in calls:
            if max(sizes) > 1 and min(sizes) > 0:
                planned = tuple(sizes[dims.index(dim)] for dim in sorted(set(dims)))
                found[planned] = found.get(planned, 0) + count
        return (dims, found) if found else None

    def _have(self, sizing: Sizing) -> set[tuple[int, ...]]:
        """The buckets that calls run in, as cells of a plan."""
        dims = self._dims
        buckets = {sizing.sizes_of(self._bucket(values)) for values in list(self._counts)}
        cells = {bucket: tuple(bucket[dims.index(dim)] for dim in sorted(set(dims))) for bucket in buckets}
        return {cell for bucket, cell in cells.items() if max(cell) > 1 and bucket == tuple(cell[dim] for dim in dims)}

    def _bucket(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that these have now."""
        key = self._keys.of(values)
        sizing = self._keys.sizing_of(key)
        return values if sizing is None else sizing.spread(self._keys.bucket_of(key))

    # What is kept for later processes

    def _recall(self) -> None:
        data = None if self._store is None else self._store.get(KIND, self._name)
        sizing = self._keys.sizing
        if self._store is None or data is None or sizing is None:
            return
        try:
            policy = Together.from_json(data.decode(errors="replace"))
        except OptionError:
            self._store.reject(KIND, self._name)
            return
        if len(policy.dims) == sizing.count and len(policy.cells) <= self._most:
            self._keys.plan(sizing.planned(policy.cells, policy))


def _listing(graph: Graph) -> list[Any]:
    """What names a part in every process: its calls, and what its inputs are."""
    return [str(graph), *(_described(node.meta.get("val")) for node in graph.find_nodes(op="placeholder"))]


def _described(value: Any) -> str:
    return str(TensorSpec.from_tensor(value)) if hasattr(value, "shape") else str(value)
