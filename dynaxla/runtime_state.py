"""What the graphs of one process share, and the functions by which a user reads it and adds to it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal
from weakref import WeakValueDictionary

import torch

from dynaxla.async_compile.service import CompileService
from dynaxla.bucket_policy import DEFAULT, Bounded, BucketPolicy
from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.cache.store import open_store
from dynaxla.errors import VersionError
from dynaxla.isolation.failures import KnownFailures, failures_file
from dynaxla.isolation.forking import CAPTURING, TRACING, hold_across_forks
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.isolation.once import once
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.recorder import Metrics, Recorder
from dynaxla.ops.table import OpRegistry, core_table
from dynaxla.programs.miss_policy import FunctionPolicies
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime.write_tracking import WriteTracker
from dynaxla.torch_api.dynamo import compile_lock
from dynaxla.torch_api.patches import apply_patches
from dynaxla.versions import check_versions

hold_across_forks(compile_lock, depth=CAPTURING)  # Dynamo's lock; Dynamo is at work before the first graph comes


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """What the graphs of one process share.

    Attributes:
        parts: the programs of the parts of captured graphs that are alive, in the order in which they were built.
    """

    recorder: Recorder = field(default_factory=Recorder)
    watch: WriteTracker = field(default_factory=WriteTracker)
    worker: LoweringWorker = field(default_factory=LoweringWorker)
    region_numbers: Iterator[int] = field(default_factory=itertools.count)
    registered: OpRegistry = field(default_factory=lambda: OpRegistry(core_table()))
    functions: FunctionTable = field(default_factory=FunctionTable)
    executables: ExecutableCache = field(default_factory=lambda: ExecutableCache(open_store()))
    marks: MarkedDims = field(default_factory=MarkedDims)
    function_policies: FunctionPolicies = field(default_factory=FunctionPolicies)
    parts: WeakValueDictionary[int, PartPrograms] = field(default_factory=WeakValueDictionary)
    tracing: threading.RLock = field(default_factory=threading.RLock)
    compile_service: CompileService = field(init=False)
    choice: LoweringChoice = field(default_factory=lambda: LoweringChoice(KnownFailures(failures_file("torch-mlir"))))

    def __post_init__(self) -> None:
        object.__setattr__(self, "compile_service", CompileService(self.recorder))


@cache
def shared_here() -> RuntimeState:
    """The process's own instance, for what captures and lowers nothing: a package needs less than is checked for."""
    with defer_interrupts():
        apply_patches()  # waits for Dynamo's lock, whose holder may wait for `_make_state`
    return _make_state()


@once
def _make_state() -> RuntimeState:
    made = RuntimeState()
    hold_across_forks(made.tracing, depth=TRACING)
    return made


@cache
def process() -> RuntimeState:
    """The process's own instance; versions are checked.

    Raises:
        VersionError: an installed library is outside the supported range.
    """
    check_versions()
    return shared_here()


def recorder() -> Recorder:
    """The process's recorder: `with dynaxla.recorder().expect(compiles=1): f(x)`."""
    return shared_here().recorder


def read_metrics() -> Metrics:
    """Counters since the process began."""
    metrics, store = recorder().snapshot(), shared_here().executables.store
    return metrics if store is None else replace(metrics, cache={**metrics.cache, **store.uses()})


def prometheus_text() -> str:
    """The counters of this process in Prometheus's text format; docs/observe.md lists their names and labels.

    Raises:
        VersionError: prometheus-client is not installed.
    """
    try:
        from dynaxla.observe.exposition import write_text
    except ModuleNotFoundError as error:
        raise VersionError("prometheus-client is not installed", "pip install 'dynaxla[metrics]'") from error
    return write_text(read_metrics())


def mark_bucketed(
    tensor: torch.Tensor,
    dim: int,
    *,
    policy: BucketPolicy | None = None,
    min: int | None = None,
    max: int | None = None,
    above: Literal["exact", "error"] = "exact",
) -> None:
    """Says that a dim of an input will vary, so that the first call already compiles a bucket.

    Args:
        tensor: an example that the compiled function will be called with.
        dim: the dim.
        policy: the buckets of its sizes; by default those of the options where there is no range, else `Default()`.
        min, max: the sizes that will come, both included: no bucket is smaller than that of `min` or larger than `max`.
        above: a larger size is compiled exactly ("exact"), or its call raises BucketError ("error").

    Raises:
        OptionError: there is no such dim, its size is outside the range, or the range is empty.
    """
    ranged = not (policy is None and min is None and max is None)
    process().marks.add(tensor, dim, Bounded(policy or DEFAULT, min, max, above) if ranged else None)
