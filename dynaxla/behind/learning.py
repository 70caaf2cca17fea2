"""Buckets that learn: the sizes of a part's calls are counted, and planned from behind the calls."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

from torch.fx import Graph

from dynaxla.behind.cells import work
from dynaxla.behind.compiler import Behind
from dynaxla.behind.jobs import Job
from dynaxla.behind.shipping import NotPadded, Planned, PlanRequest
from dynaxla.behind.wants import Wants
from dynaxla.bucketing.keys import Keys
from dynaxla.bucketing.planning import Plan
from dynaxla.bucketing.sizing import Sizing
from dynaxla.cache.key import Key as StoreKey
from dynaxla.cache.store import Store
from dynaxla.errors import OptionError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.stages import TensorSpec

logger = logging.getLogger("dynaxla")

KIND = "plan"

FIRST_PLAN = 64
"""After so many calls the sizes are planned for the first time, and then each time that there are twice as many."""

WORTH = 0.95
"""A plan is taken that leaves at most this share of the padded elements there are without it."""

MOST_SIZES = 4096
"""So many different sizes are counted; with more of them single ones say little."""

MOST_DIMS = 2

_LIMITS = Limits(300.0, 4 << 30)


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
        self._counts: dict[tuple[int, ...], int] = {}
        self._calls = 0
        self._due = FIRST_PLAN
        self._recall()

    def count(self, values: tuple[int, ...]) -> None:
        """Counts a call."""
        counts = self._counts
        if values in counts or len(counts) < MOST_SIZES:
            counts[values] = counts.get(values, 0) + 1
        self._calls += 1
        if self._calls >= self._due:
            self._due *= 2
            if (sizing := self._plannable()) is not None and self._classes(sizing):
                self._behind.ask(Job(weakref.ref(self), (), (), (), time.monotonic(), awaited=True))

    # What the child is asked, and what becomes of its answer

    def request(self, job: Job, whole: bool) -> PlanRequest:
        sizing = self._plannable()
        assert sizing is not None
        return PlanRequest(self._classes(sizing), self._most)

    def take(self, job: Job, reply: Planned) -> bool:
        """Takes a plan that is worth it; whether it was."""
        sizing = self._plannable()
        plan = Plan.from_json(reply.plan)
        if sizing is None or len(plan.cells[0]) != sizing.count:
            return False  # sizes that were equal in every call were not, meanwhile
        made, counts = sizing.planned(plan.cells, plan), dict(self._counts)
        if work(counts, made.bucket) > WORTH * work(counts, self._bucket):
            return False
        self._change(made, counts)
        self._keep(sizing, plan)
        return True

    def refuse(self, job: Job, refusal: NotPadded) -> None:
        """No plan is refused."""

    def make_here(self, job: Job, why: str) -> None:
        """A plan is always made by a child."""

    def end(self, job: Job, *, again: bool) -> None:
        job.ended.set()

    def _change(self, sizing: Sizing, counts: dict[tuple[int, ...], int]) -> None:
        """Has the programs of a plan made, the most wanted first; each is used from when it is there."""
        cells: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for values in counts:
            if sizing.fits(values) and sizing.covers(values):
                cells.setdefault(sizing.bucket(values), []).append(values)
        tag = self._keys.plan(sizing)
        self._recorder.add(plans=1)
        logger.info("sizes were planned anew: %d buckets", len(cells))
        for cell, of in cells.items():
            self._wants.ask((tag, *cell), of[0], (), calls=sum(counts[values] for values in of))

    def _plannable(self) -> Sizing | None:
        """The part's sizing, if it has few enough sizes."""
        sizing = self._keys.sizing
        return sizing if sizing is not None and 1 <= sizing.count <= MOST_DIMS else None

    def _classes(self, sizing: Sizing) -> dict[tuple[int, ...], int]:
        """How many calls had which sizes of its classes, of those to be padded."""
        found: dict[tuple[int, ...], int] = {}
        for values, count in list(self._counts.items()):
            sizes = sizing.sizes_of(values)
            if max(sizes) > 1 and min(sizes) > 0:
                found[sizes] = found.get(sizes, 0) + count
        return found

    def _bucket(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The bucket that these sizes have now."""
        key = self._keys.of(values)
        return values if self._keys.sizing_of(key) is None else self._keys.bucket_of(key)

    # What is kept for later processes

    def _recall(self) -> None:
        data = None if self._store is None else self._store.get(KIND, self._name)
        sizing = self._plannable()
        if self._store is None or data is None or sizing is None:
            return
        try:
            plan = Plan.from_json(data.decode(errors="replace"))
        except OptionError:
            self._store.reject(KIND, self._name)
            return
        if len(plan.cells[0]) == sizing.count and len(plan.cells) <= self._most:
            self._keys.plan(sizing.planned(plan.cells, plan))

    def _keep(self, sizing: Sizing, plan: Plan) -> None:
        if self._store is not None:
            self._store.put(KIND, self._name, plan.to_json().encode(), {"cells": len(plan.cells)})


def _listing(graph: Graph) -> list[Any]:
    """What names a part in every process: its calls, and what its inputs are."""
    return [str(graph), *(_described(node.meta.get("val")) for node in graph.find_nodes(op="placeholder"))]


def _described(value: Any) -> str:
    return str(TensorSpec.from_tensor(value)) if hasattr(value, "shape") else str(value)
