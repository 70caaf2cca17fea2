"""What is measured of a function's calls before anything is said of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaxla.observe.recorder import Metrics
from dynaxla.profiling.device_ops import DeviceOp
from dynaxla.profiling.profile import HostSpan, Profile, profile
from dynaxla.profiling.session import PREFIX
from dynaxla.runtime_state import process, read_metrics
from dynaxla.torch_api.pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class MeasuredCalls:
    """Calls of a function, and a profile of one more.

    Attributes:
        seconds: of each call, the first one compiles.
        changes: what each call added to the counters.
        whole: what all of them added.
        last: a profile of a call behind these.
        last_change: what that call added to the counters.
        eager_s: of a call of the function itself, uncompiled, the median of some; None: there is no such function.
        gradients: whether a backward was part of each call.
        floats: the dtypes of the tensors of floats that the function is given, its parameters included.
    """

    seconds: tuple[float, ...]
    changes: tuple[Metrics, ...]
    whole: Metrics
    last: Profile
    last_change: Metrics
    eager_s: float | None
    gradients: bool
    floats: frozenset[torch.dtype]

    @property
    def steady_s(self) -> float:
        """The median of the calls that compiled and captured nothing; the least of all calls if each one did."""
        quiet = [s for s, change in zip(self.seconds, self.changes, strict=True) if not is_compiling(change)]
        return statistics.median(quiet) if quiet else min(self.seconds)

    @property
    def ops(self) -> list[DeviceOp]:
        """The instructions of the profiled call."""
        return self.last.ops

    @property
    def device_ms(self) -> float:
        return sum(op.self_ns for op in self.ops) / 1e6

    @property
    def parts(self) -> list[HostSpan]:
        """The calls of compiled parts in the profiled call."""
        return [span for span in self.last.spans if span.name == f"{PREFIX}call"]

    def overhead_ms(self, part: HostSpan) -> float:
        """The time of a part's call without that of its program's run."""
        runs = [
            s for s in self.last.spans if s.name == f"{PREFIX}execute" and part.start_ms <= s.start_ms < part.end_ms
        ]
        return part.end_ms - part.start_ms - sum(run.end_ms - run.start_ms for run in runs)

    def total_ms(self, name: str) -> float:
        """The time of all ranges of this name in the profiled call."""
        return sum(span.end_ms - span.start_ms for span in self.last.spans if span.name == name)


def is_compiling(change: Metrics) -> bool:
    """Whether a call captured, compiled or loaded anything."""
    return bool(change.graphs or change.executables or change.folds or change.fold_loads)


def measure_calls(
    function: Callable[..., Any],
    eager: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    calls: int,
    backward: bool,
) -> MeasuredCalls:
    """Calls a compiled function, then profiles one more call.

    Args:
        eager: the same uncompiled, for comparison.
        calls: how many, at least 2.
        backward: whether the sum of all results is differentiated in each call.
    """

    def run(called: Callable[..., Any]) -> None:
        results = called(*args, **kwargs)
        if backward:
            _sum(results).backward()
        _wait(results)

    first = read_metrics()
    seconds: list[float] = []
    changes: list[Metrics] = []
    for _ in range(calls):
        before, started = read_metrics(), time.perf_counter()
        run(function)
        seconds.append(time.perf_counter() - started)
        changes.append(_subtract(read_metrics(), before))
    before = read_metrics()
    whole = _subtract(before, first)
    with profile() as last:
        run(function)
    last_change = _subtract(read_metrics(), before)
    eager_s = None if eager is None else _time_eager(lambda: run(eager))
    given = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    given += [*eager.parameters(), *eager.buffers()] if isinstance(eager, nn.Module) else []
    floats = frozenset(tensor.dtype for tensor in given if tensor.dtype.is_floating_point)
    return MeasuredCalls(tuple(seconds), tuple(changes), whole, last, last_change, eager_s, backward, floats)


def _time_eager(run: Callable[[], None]) -> float:
    run()
    seconds: list[float] = []
    while len(seconds) < 3:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _sum(results: Any) -> Tensor:
    floats = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.abs().sum() for leaf in floats), torch.zeros(()))


def _wait(results: Any) -> None:
    """Until what a device computes is there."""
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize()
            return


def _subtract(after: Metrics, before: Metrics) -> Metrics:
    """What was added between two snapshots."""
    return Metrics(**{e.name: _added(getattr(after, e.name), getattr(before, e.name)) for e in fields(Metrics)})


def _added(now: Any, then: Any) -> Any:
    """What was added to a counter, a list, or the counters of a map or a frozen value."""
    if isinstance(now, tuple):
        return now[len(then) :]
    if isinstance(now, Mapping):
        changed = {key: value for key, value in now.items() if value != then.get(key)}
        return {key: _added(value, then[key]) if key in then else value for key, value in changed.items()}
    if is_dataclass(now) and not isinstance(now, type):
        return type(now)(*(_added(getattr(now, each.name), getattr(then, each.name)) for each in fields(now)))
    return now - then


def forget_captures() -> None:
    """Makes the process's state, and has Dynamo forget what it captured."""
    process()
    torch.compiler.reset()
