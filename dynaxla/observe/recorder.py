"""Counters of what the backend did, and assertions on them for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from dynaxla.isolation.forking import new_lock
from dynaxla.observe.breaks import Capture


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of the counters since the process began.

    Attributes:
        graphs: graphs handed over by Dynamo (forward and backward count apart).
        compiles: XLA compiles of graph parts (executables).
        folds: XLA compiles of weight-only programs, which run once per weight version.
        loads, fold_loads: executables of either kind that were found on disk and not compiled.
        lowering_s, compile_s: seconds spent in lowering and in XLA.
        eager_ops: ops that run in eager PyTorch.
        lowering_failures: distinct calls that torch-mlir was found to fail on.
        evictions: executables dropped because a graph had more than `max_executables`.
        misses: calls of a frozen function that needed a program that is not there.
        fallbacks: one readable line per op that runs in eager, with its reason.
        exact_shapes: one readable line per part that is compiled per exact shape, with the op that keeps it from buckets.
        many_programs: one readable line per part that passed 8 programs for one reason: exact shapes, or buckets that the
            user did not choose; and per part that passed `max_executables`.
        last_captures: one readable line per function that Dynamo captured as often as its limit allows, so that calls with
            other guards run in eager.
        captured: the graphs that Dynamo captured, each with the reason why it ended before its function did.
    """

    graphs: int = 0
    compiles: int = 0
    folds: int = 0
    loads: int = 0
    fold_loads: int = 0
    lowering_s: float = 0.0
    compile_s: float = 0.0
    eager_ops: int = 0
    lowering_failures: int = 0
    evictions: int = 0
    misses: int = 0
    fallbacks: tuple[str, ...] = ()
    exact_shapes: tuple[str, ...] = ()
    many_programs: tuple[str, ...] = ()
    last_captures: tuple[str, ...] = ()
    captured: tuple[Capture, ...] = ()

    @property
    def executables(self) -> int:
        """Executables of graph parts that were made ready: compiled, or found on disk."""
        return self.compiles + self.loads


@dataclass(slots=True)
class Recorder:
    """Counts. Written to once per compile, per graph or per call that misses, never per call that finds its program."""

    _metrics: Metrics = field(default_factory=Metrics)
    _lock: threading.Lock = field(default_factory=new_lock)

    def add(self, **amounts: float) -> None:
        """Adds to the counters named."""
        with self._lock:
            self._metrics = _plus(self._metrics, amounts)

    def note_fallback(self, line: str) -> None:
        with self._lock:
            self._metrics = _plus(self._metrics, {"fallbacks": (line,)})

    def note_exact_shape(self, line: str) -> None:
        with self._lock:
            self._metrics = _plus(self._metrics, {"exact_shapes": (line,)})

    def note_many_programs(self, line: str) -> None:
        with self._lock:
            self._metrics = _plus(self._metrics, {"many_programs": (line,)})

    def note_last_capture(self, line: str) -> None:
        with self._lock:
            self._metrics = _plus(self._metrics, {"last_captures": (line,)})

    def note_capture(self, capture: Capture) -> None:
        with self._lock:
            self._metrics = _plus(self._metrics, {"captured": (capture,)})

    def snapshot(self) -> Metrics:
        return self._metrics

    @contextmanager
    def expect(self, **amounts: int) -> Iterator[None]:
        """Asserts that the block adds exactly these amounts: `with recorder.expect(compiles=1): f(x)`.

        Raises:
            AssertionError: a counter moved by another amount.
        """
        before = self._metrics
        yield
        after = self._metrics
        for name, amount in amounts.items():
            moved = getattr(after, name) - getattr(before, name)
            if moved != amount:
                raise AssertionError(f"expected {name} to grow by {amount}, it grew by {moved}")


def _plus(metrics: Metrics, amounts: Mapping[str, object]) -> Metrics:
    values = {f.name: getattr(metrics, f.name) for f in fields(metrics)}
    for name, amount in amounts.items():
        values[name] = values[name] + amount
    return Metrics(**values)
