"""Every call: sizes -> shape key -> program -> bind, run, crop. On a miss the function's policy decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaxla.async_compile.adaptive_buckets import AdaptiveBuckets
from dynaxla.async_compile.part_client import PartCompileClient
from dynaxla.async_compile.prefetch import ProgramPrefetcher
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.programs.argument_binder import make_binder
from dynaxla.programs.counted_calls import count_calls
from dynaxla.programs.miss_policy import MissPolicy
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.sharding_misses import RunProgram, serve_shardings
from dynaxla.runtime.write_tracking import WriteTracker
from dynaxla.torch_api.gc_guard import pause_collection

PartFunction = Callable[[Sequence[Any]], list[Any]]
CallListener = Callable[[tuple[int, ...], bool], None]
"""Is told of every call: its sizes, and whether there is a program for them."""


class CompiledPart:
    """One compiled part of a graph.

    Takes the part's arguments (tensors and plain integers) and returns its results. Safe from several threads, which compile
    different programs at the same time. On a miss it may raise what `Pipeline.compile` raises, before anything ran.

    Args:
        programs: the part's programs.
        run: runs a program: converts arguments to buffers and results to tensors.
        misses: serves the calls that have no program.
        on_call: listeners to every call.
    """

    def __init__(
        self, programs: PartPrograms, run: RunProgram, misses: MissHandler, on_call: Sequence[CallListener]
    ) -> None:
        self._keys = programs.keys
        self._has_sizes = programs.keys.has_sizes
        self._programs = programs
        self._find = programs.get
        self._run = run
        self._serve_miss = misses.serve
        self._on_call = tuple(on_call)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        values: tuple[int, ...] = ()
        key: ShapeKey = ()  # of the one program of a part whose sizes are all known
        if self._has_sizes:
            values = self._keys.read(args)
            key = self._keys.of(values)
        program = self._find(key)
        for listener in self._on_call:
            listener(values, program is not None)
        if program is None:
            results = self._serve_miss(key, values, args)
            return self(args) if results is None else results
        if key:
            self._programs.mark_used(key)
        return self._run(program, values, args)


@dataclass(frozen=True, slots=True)
class MissHandler:
    """Serves the calls of one part that have no program. It is the `MissedPart` of the policies; `client` asks for programs to
    be compiled in the background."""

    programs: PartPrograms
    run: RunProgram
    policy: Callable[[], MissPolicy]
    client: PartCompileClient

    def serve(self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any]) -> list[Any] | None:
        """Returns the part's results as the policy decides; None if a program was added meanwhile and the call starts again.

        Raises:
            FrozenError: the function is frozen, and its policy raises.
        """
        self.programs.compiler.pipeline.recorder.count_cache("memory", misses=1)
        return self.policy().serve(self, key, values, args)

    def count_miss(self) -> None:
        self._count(misses=1)

    def compile(self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        with pause_collection():
            results = self.run(self.programs.compile(key, values, args), values, args)
        for listener in self.programs.listeners:
            listener.on_waited()
        return results

    def compile_in_background(
        self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any], *, waits: bool
    ) -> list[Any] | None:
        job = self.client.ask(key, values, args, awaited=waits)
        if job is not None and waits:
            job.ended.wait()
            now = self.programs.keys.of(values)
            if now in self.programs or now != key:  # the same sizes may have another key by now
                return None
        return self._run_substitute(values, args, is_measured=True)

    def run_larger(self, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        return self._run_substitute(values, args, is_measured=False)

    def run_eager(self, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        self._count(served_eager=1)
        results = self.programs.compiler.graphs.run_eager(args)
        elements = self.programs.keys.elements(values)
        self.client.costs.note_eager(elements, time.perf_counter() - started)
        return results

    def explain_miss(self, key: ShapeKey) -> str:
        return f"the sizes {key}; there are: {', '.join(map(str, self.programs)) or 'none'}"

    def _run_substitute(self, values: tuple[int, ...], args: Sequence[Any], *, is_measured: bool) -> list[Any]:
        """Runs the program of the smallest larger bucket that has one, or in eager.

        Args:
            is_measured: whether the program must have been measured as cheaper than eager.
        """
        programs, costs = self.programs, self.client.costs
        padded, key = next(iter(programs.keys.larger(values)), (0, ()))
        program = programs.get(key) if padded else None
        if program is None:
            return self.run_eager(values, args)
        if is_measured and not costs.prefers_program(key, padded, programs.keys.elements(values)):
            return self.run_eager(values, args)
        started = time.perf_counter()
        programs.mark_used(key)
        self._count(served_larger=1)
        results = self.run(program, values, args)
        costs.note_program(key, time.perf_counter() - started)
        return results

    def _count(self, **counters: int) -> None:
        self.programs.compiler.pipeline.recorder.add(**counters)


def make_part(
    programs: PartPrograms, watch: WriteTracker, policy: Callable[[], MissPolicy], service: CompileService
) -> PartFunction:
    """Makes a compiled part with the listeners to its calls and its programs.

    Args:
        watch: notices writes to weights in host memory.
        policy: returns the miss policy of the compiled function that is being called.
        service: compiles in the background.
    """
    compiler = programs.compiler
    binder = make_binder(compiler.pipeline.client, compiler.graphs.facts, watch, programs.compile_fold)
    run, policy = serve_shardings(binder.run, compiler, policy)
    client, prefetcher = PartCompileClient(programs, service), ProgramPrefetcher(programs, service)
    programs.listeners += [client.costs, prefetcher]
    on_call: list[CallListener] = []
    run_known = run
    if programs.adapts_buckets and programs.keys.scheme is not None:
        buckets = AdaptiveBuckets.of(programs, client, service, policy)
        on_call.append(buckets.on_call)
        run_known = buckets.measure(run)
    if compiler.pipeline.options.compile == "behind":
        on_call.append(compiler.pipeline.recorder.on_call)
    part = CompiledPart(programs, run_known, MissHandler(programs, run, policy, client), on_call)
    if compiler.graphs.are_known:  # its programs may be on disk: load them before the first call
        prefetcher.load_likely()
    return count_calls(part, programs) if compiler.pipeline.options.call_metrics else part
