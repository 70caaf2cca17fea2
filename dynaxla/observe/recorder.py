"""Counters of what the backend did, and assertions on them for tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dynaxla.isolation.forking import new_lock, notify_after_fork
from dynaxla.observe.graph_breaks import CaptureRecord
from dynaxla.observe.usage import CacheUse, CallCounter, CrossedBytes, PartCalls, StageUse


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of the counters since the process began.

    Attributes:
        graphs: graphs handed over by Dynamo (forward and backward count apart).
        compiles: XLA compiles of graph parts (executables).
        folds: XLA compiles of weight-only programs, which run once per weight version.
        loads, fold_loads: executables (of parts, of weight-only programs) that were loaded from disk instead of compiled.
        captures_loaded: graphs that were built from a capture in torch's cache.
        capture_s, passes_s, lowering_s, compile_s, loading_s: seconds spent in Dynamo and AOTAutograd (with what these
            wait for), in passes, in lowering, in XLA, and in loading executables.
        eager_ops: ops that run in eager PyTorch.
        lowering_failures: distinct calls that torch-mlir failed to lower.
        evictions: executables dropped because a graph had more than `max_executables`.
        misses: calls of a frozen function for which no program is compiled.
        served_own, served_larger, served_eager: calls of parts that compile in the background, by what they ran in: the program
            of their own sizes, that of a larger bucket, eager PyTorch. Misses of frozen parts count too.
        jobs_done, jobs_failed, jobs_dropped: background compiles that succeeded (or found that no program is possible), that
            failed, and that were dropped because the program was no longer needed.
        jobs_here: background compiles that ran in a thread of this process; `unshipped` has the reasons.
        plans: bucket plans that were computed from the sizes of the calls.
        unshipped: one readable line per part that child processes cannot compile.
        fallbacks: one readable line per op that runs in eager, with its reason.
        exact_shapes: one readable line per part that is compiled per exact shape, with the op that keeps it from buckets.
        many_programs: one readable line per part with more than 8 programs for one reason (exact shapes, or buckets that the
            user did not choose), and per part with more than `max_executables`.
        last_captures: one readable line per function that reached Dynamo's recompile limit, so that calls with other guards
            run in eager.
        captures_not_kept: one readable line per capture that cannot be cached, so every process repeats it, with the reason.
        captures_discarded: one readable line per stored capture that could not be used, with the reason; it was removed, and
            the graph captured anew.
        host_ops: calls of ops on the device's tensors that eager PyTorch computed on the host, by the op's name.
        host_bytes: what crossed between the device and the host for these.
        traces: runs of ops that the device's lazy mode collected.
        traces_apart: traces whose ops were run one by one, as no common program could be compiled.
        captured: the graphs that Dynamo captured, with the reason if one ended before its function did.
        verified_calls, diverged_calls: calls of graphs that were compared with eager, and those whose results differed.
        divergences: one readable line per graph whose results differed: the op, the pass, the repro.
        unverified: one readable line per graph that cannot be compared with eager, with the reason.
        cache: what each tier of the cache was used for: "memory" (loaded programs; hits are counted with `call_metrics`),
            "package", "capture", and by their names the kinds of entries on disk ("executable", "metadata", "function" ...).
        parts: the calls of compiled parts, by bucket and by their seconds, with `options={"call_metrics": True}`.
    """

    graphs: int = 0
    compiles: int = 0
    folds: int = 0
    loads: int = 0
    fold_loads: int = 0
    captures_loaded: int = 0
    capture_s: float = 0.0
    passes_s: float = 0.0
    lowering_s: float = 0.0
    compile_s: float = 0.0
    loading_s: float = 0.0
    eager_ops: int = 0
    lowering_failures: int = 0
    evictions: int = 0
    misses: int = 0
    served_own: int = 0
    served_larger: int = 0
    served_eager: int = 0
    jobs_done: int = 0
    jobs_failed: int = 0
    jobs_dropped: int = 0
    jobs_here: int = 0
    plans: int = 0
    unshipped: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    exact_shapes: tuple[str, ...] = ()
    many_programs: tuple[str, ...] = ()
    last_captures: tuple[str, ...] = ()
    captures_not_kept: tuple[str, ...] = ()
    captures_discarded: tuple[str, ...] = ()
    host_ops: Mapping[str, int] = field(default_factory=dict)
    host_bytes: Mapping[str, CrossedBytes] = field(default_factory=dict)
    traces: int = 0
    traces_apart: int = 0
    captured: tuple[CaptureRecord, ...] = ()
    verified_calls: int = 0
    diverged_calls: int = 0
    divergences: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    cache: Mapping[str, CacheUse] = field(default_factory=dict)
    parts: tuple[PartCalls, ...] = ()

    @property
    def stages(self) -> Mapping[str, StageUse]:
        """The stages of compiling, in their order."""
        return {
            "capture": StageUse(len(self.captured), self.capture_s),
            "passes": StageUse(self.graphs, self.passes_s),
            "lowering": StageUse(self.compiles + self.folds, self.lowering_s),
            "xla": StageUse(self.compiles + self.folds, self.compile_s),
            "loading": StageUse(self.loads + self.fold_loads, self.loading_s),
        }

    @property
    def executables(self) -> int:
        """Executables of graph parts that were compiled or loaded from disk."""
        return self.compiles + self.loads


@dataclass(slots=True, eq=False, weakref_slot=True)
class Recorder:
    """Counts events. It is called once per compile, per graph and per call that misses; calls that hit are counted only in
    parts that compile in the background, by one integer."""

    _metrics: Metrics = field(default_factory=Metrics)
    _lock: threading.Lock = field(default_factory=new_lock)
    _served_own: int = 0
    _traces: int = 0
    _host_ops: Counter[str] = field(default_factory=Counter)
    _host_bytes: dict[str, CrossedBytes] = field(default_factory=dict)
    _cache: dict[str, CacheUse] = field(default_factory=dict)
    _calls: list[CallCounter] = field(default_factory=list)
    _under_way: set[Future[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        notify_after_fork(self)

    def after_fork(self) -> None:
        """The threads that count what is under way are the parent's."""
        self._under_way = set()

    def wait_before_reading(self, work: Future[Any]) -> None:
        """Has `snapshot` wait for work in another thread that counts what it does: its counts are those of the calls made."""
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)

    def add(self, **amounts: float) -> None:
        """Adds the amounts to the counters of these names."""
        with self._lock:
            self._metrics = _plus(self._metrics, amounts)

    def on_call(self, values: tuple[int, ...], is_hit: bool) -> None:
        """Counts a call that runs in the program of its own sizes."""
        if is_hit:
            with self._lock:
                self._served_own += 1

    def count_trace(self) -> None:
        """Counts a run of ops that the lazy mode collected."""
        with self._lock:
            self._traces += 1

    def count_on_host(self, op: str, crossed: CrossedBytes) -> None:
        """Counts a call of a device op that eager PyTorch computed on the host, and what crossed for it."""
        with self._lock:
            self._host_ops[op] += 1
            self._host_bytes[op] = self._host_bytes.get(op, CrossedBytes()) + crossed

    def note(self, **entries: object) -> None:
        """Adds an entry to each of the lists of these names."""
        with self._lock:
            self._metrics = _plus(self._metrics, {name: (entry,) for name, entry in entries.items()})

    def count_cache(self, tier: str, **amounts: int) -> None:
        """Adds the amounts to the fields of a tier's `CacheUse`."""
        with self._lock:
            self._cache[tier] = self._cache.get(tier, CacheUse()) + CacheUse(**amounts)

    def count_calls(self, function: str, most: int, describe: Callable[[Hashable], str]) -> CallCounter:
        """Makes the counter of a part's calls; the arguments are those of `CallCounter`."""
        with self._lock:
            counter = CallCounter(function, len(self._calls), most, describe)
            self._calls.append(counter)
        return counter

    def snapshot(self) -> Metrics:
        """The counts, when what is under way has been counted."""
        wait(tuple(self._under_way))
        parts = tuple(counter.snapshot() for counter in self._calls)
        cache = dict(self._cache)
        if hits := sum(part.hits for part in parts):
            cache["memory"] = cache.get("memory", CacheUse()) + CacheUse(hits)
        metrics = replace(self._metrics, served_own=self._served_own, traces=self._traces)
        metrics = replace(metrics, host_ops=dict(self._host_ops), host_bytes=dict(self._host_bytes))
        return replace(metrics, cache=cache, parts=parts)

    @contextmanager
    def expect(self, **amounts: int) -> Iterator[None]:
        """Asserts that the block adds exactly these amounts: `with recorder.expect(compiles=1): f(x)`.

        Raises:
            AssertionError: a counter moved by another amount.
        """
        before = self.snapshot()
        yield
        after = self.snapshot()
        for name, amount in amounts.items():
            moved = getattr(after, name) - getattr(before, name)
            if moved != amount:
                raise AssertionError(f"expected {name} to grow by {amount}, it grew by {moved}")


def _plus(metrics: Metrics, amounts: Mapping[str, object]) -> Metrics:
    values = {f.name: getattr(metrics, f.name) for f in fields(metrics)}
    for name, amount in amounts.items():
        values[name] = values[name] + amount
    return Metrics(**values)
