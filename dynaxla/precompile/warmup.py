"""Before traffic: compiling every bucket that is declared, and forbidding compiles afterwards."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynaxla.bucket_policy import Bounded
from dynaxla.bucket_policy.declared import combinations, declared_buckets
from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.device.sharding import shard, sharding
from dynaxla.errors import OptionError
from dynaxla.programs.miss_policy import FunctionPolicy, OnMiss, check_on_miss
from dynaxla.runtime_state import process
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only

Example: TypeAlias = Sequence[object] | Mapping[str, object]
"""The arguments of a call: a sequence of them, or a mapping where all have keywords."""

MOST_WORKERS = 4
ENDED = "the warm-up ends with the process"


def warmup(
    compiled: Callable[..., object],
    *examples: Example,
    progress: bool | Callable[[int, int], object] = True,
    workers: int | None = None,
    wait: bool = True,
) -> int:
    """Compiles every bucket of the declared ranges, largest first, by calling the function at each.

    The inputs are the examples, their marked dims cut or repeated to a bucket's size; dims of one size and one range vary
    together. The calls are real ones: they draw random numbers and change buffers as any call does, under the caller's
    grad, inference and autocast modes. Dynamo captures in the first calls; the others run side by side.

    Args:
        compiled: what torch.compile returned.
        examples: for each kind of call its arguments, as a tuple, or as a mapping where all have keywords. Dims that vary
            are marked by `dynaxla.mark_bucketed` with a `max`; sizes 0 and 1 are left out unless `min` says else. An
            example without ranges is called as it is. Tensors on a mesh are sharded as in the calls to come: programs are
            compiled for that, so there is one example for each way in which calls are sharded.
        progress: show a bar; or what is called after every call, with how many are done and how many there are.
        workers: threads; by default one per two processor cores, at most 4.
        wait: False calls the function at each bucket in eager, where its program is not there, and returns: child processes
            compile the programs behind the calls that follow (docs/async_compile.md), the most wanted first.

    Returns:
        How many executables were made ready: compiled, or found on disk.

    Raises:
        OptionError: the function is not compiled by dynaxla, there is no example, a range has no `max`, dims of one size
            have different ranges, or the options keep fewer executables than there are buckets.
        ShardingError: a bucket has a size that the devices over which the example's dim is split do not divide.
        RuntimeError: the main thread has ended meanwhile, so the process is about to end: what is left is not compiled.
    """
    shared = process()
    function = shared.function_policies.of(compiled)
    if not examples:
        raise OptionError("warmup needs an example of the arguments", "give them as a tuple, or a mapping for keywords")
    before = shared.recorder.snapshot()
    calls = enumerate_calls(examples, shared.marks)
    with _bar(progress is True) as bar, _waiting(function, wait):
        task = bar.add_task("compiling", total=len(calls))
        running = _run(calls, compiled, function, workers or min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // 2)))
        for done, _ in enumerate(running, start=1):
            bar.advance(task)
            if callable(progress):
                progress(done, len(calls))
    after = shared.recorder.snapshot()
    if after.evictions > before.evictions:
        raise OptionError(
            f"{after.executables - before.executables} executables were made, and some dropped again to make room",
            "raise options={'max_executables': ...}, or declare fewer buckets",
        )
    return after.executables - before.executables


def freeze(compiled: Callable[..., object], on_miss: OnMiss = "error") -> None:
    """Forbids that calls of a compiled function wait for a compile. It may be called again to change what happens.

    Args:
        compiled: what torch.compile returned.
        on_miss: what a call does whose program is not there, for its sizes or, on a mesh, for the shardings of its arguments,
            weights among them: "error" raises FrozenError; "eager" runs the captured graph in eager PyTorch; "next_bucket"
            runs the smallest larger program that is there, else eager; "background" does as "next_bucket" while the right
            one is compiled, or compiles if a mesh was made; "compile" compiles, as before the first freeze. A graph that
            Dynamo captures anew raises, runs in eager (for "next_bucket" too), or has its parts compiled in the background.
            Results are the same in all cases; `Metrics.misses` counts them.

    Raises:
        OptionError: the function is not compiled by dynaxla, or `on_miss` is another word.
    """
    check_on_miss(on_miss)
    process().function_policies.of(compiled).freeze(on_miss)


def enumerate_calls(examples: Sequence[Example], marks: MarkedDims) -> list[_Call]:
    """Every call at a bucket of the declared ranges, largest first.

    Raises:
        OptionError: a range has no `max`, or dims of one size have different ranges.
    """
    calls = [call for example in examples for call in _calls(example, marks)]
    return sorted(calls, key=lambda call: call.elements, reverse=True)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the warm-up: an example, and the sizes that replace some of its own.

    Attributes:
        ranges: of sizes that vary, by the example's size.
        sizes: what takes their place.
    """

    example: Example
    marks: MarkedDims
    ranges: Mapping[int, Bounded]
    sizes: Mapping[int, int]

    @property
    def graph(self) -> tuple[int, tuple[int, ...]]:
        """Equal for calls that have one graph of Dynamo, which captures apart for each size 0 and 1."""
        return id(self.example), tuple(min(size, 2) for size in self.sizes.values())

    @property
    def declared(self) -> dict[int, Bounded]:
        """The ranges by this call's own sizes."""
        return {self.sizes[size]: bounded for size, bounded in self.ranges.items()}

    @property
    def elements(self) -> int:
        """How many the call's tensors have together."""
        return sum(math.prod(self._shape(tensor)) for tensor in _tensors(self.example))

    def run(self, compiled: Callable[..., object]) -> None:
        made = tree_map_only(torch.Tensor, self._resized, self.example)
        if isinstance(made, Mapping):
            compiled(**made)
        else:
            compiled(*made)

    def _shape(self, tensor: torch.Tensor) -> list[int]:
        marked = self.marks.of(tensor)
        return [self.sizes[size] if dim in marked else size for dim, size in enumerate(tensor.shape)]

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        marked = self.marks.of(tensor)
        if not marked:
            return tensor
        shape = self._shape(tensor)
        made = resize_example(tensor, {dim: shape[dim] for dim in marked})
        for dim, bounded in marked.items():
            self.marks.add(made, dim, bounded)
        return made


def resize_example(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A tensor of other sizes: its elements, again and again where there are too few, so that they stay what the function
    expects; on a mesh it is sharded as the tensor is.

    Args:
        sizes: by dim, of the dims that change.
    """
    with torch.inference_mode(tensor.is_inference()):  # tensors that differ in this have graphs of their own
        placed = sharding(tensor)
        made = tensor.detach().cpu()  # where nothing is compiled for it
        for dim, size in sizes.items():
            made = made.index_select(dim, torch.arange(size) % max(tensor.shape[dim], 1))
        made = made.to(tensor.device) if placed is None else shard(made, placed.mesh, placed.spec)
    return made.requires_grad_(tensor.requires_grad)


def _tensors(example: Example) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]


def _calls(example: Example, marks: MarkedDims) -> Iterator[_Call]:
    ranges: dict[int, Bounded] = {}
    for tensor in _tensors(example):
        for dim, bounded in marks.of(tensor).items():
            _add_range(ranges, tensor.shape[dim], bounded)
    for sizes in combinations({size: declared_buckets(bounded) or () for size, bounded in ranges.items()}):
        yield _Call(example, marks, ranges, sizes)


def _add_range(ranges: dict[int, Bounded], size: int, bounded: Bounded) -> None:
    if bounded.max is None:
        raise OptionError(f"the range of the dim of size {size} has no end", "give mark_bucketed a max")
    if ranges.setdefault(size, bounded) != bounded:
        raise OptionError(
            f"two dims of size {size} have different ranges or policies",
            "give the example different sizes, so that they can be told apart",
        )


@contextmanager
def _waiting(function: FunctionPolicy, wait: bool) -> Iterator[None]:
    """Has calls wait for what is compiled in the background, or not."""
    function.waits = wait
    try:
        yield
    finally:
        function.waits = None


def _run(
    calls: Sequence[_Call], compiled: Callable[..., object], function: FunctionPolicy, workers: int
) -> Iterator[None]:
    """Runs all calls: the largest and the smallest of every graph first and in turn, for Dynamo to capture in."""
    captures = [call for call in calls if not _is_between(call, calls)]
    try:
        for call in captures:
            _check_process()
            function.declared = call.declared
            call.run(compiled)
            yield
    finally:
        function.declared = None
    modes = _Modes.current()
    _check_process()
    captured = {id(call) for call in captures}
    rest = (call for call in calls if id(call) not in captured)
    with ThreadPoolExecutor(workers, thread_name_prefix="dynaxla-warmup") as pool:
        running: set[Future[None]] = set()
        while True:
            # No more than can run: Python waits at its end for all that a pool was given.
            running |= {_submit(pool, modes, call, compiled) for call in itertools.islice(rest, workers - len(running))}
            if not running:
                break
            done, running = wait_for(running, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()
                yield


def _submit(pool: ThreadPoolExecutor, modes: _Modes, call: _Call, compiled: Callable[..., object]) -> Future[None]:
    try:
        return pool.submit(modes.run, call, compiled)
    except RuntimeError:  # the pool takes nothing once the main thread has ended
        raise RuntimeError(ENDED) from None


def _check_process() -> None:
    if not threading.main_thread().is_alive():
        raise RuntimeError(ENDED)


def _is_between(call: _Call, calls: Sequence[_Call]) -> bool:
    """Whether the graph has both a larger call and a smaller one; calls are in order."""
    alike = [other for other in calls if other.graph == call.graph]
    return call is not alike[0] and call is not alike[-1]


@dataclass(frozen=True, slots=True)
class _Modes:
    """Torch's modes of a thread, which other threads do not inherit."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def current(cls) -> _Modes:
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in devices)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def run(self, call: _Call, compiled: Callable[..., object]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            call.run(compiled)


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not shown)
