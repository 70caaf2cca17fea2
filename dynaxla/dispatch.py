"""Every call: sizes -> bucket -> executable -> pad, run, crop. What can be decided once is decided in `__init__`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaxla.async_compile.adaptive_buckets import AdaptiveBuckets
from dynaxla.async_compile.part_client import PartCompileClient
from dynaxla.async_compile.prefetch import ProgramPrefetcher
from dynaxla.async_compile.service import CompileService
from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.bucketing.recompile_warning import Crowd
from dynaxla.bucketing.shape_keys import EXACT, Key, Keys
from dynaxla.bucketing.size_buckets import Policies
from dynaxla.diagnostics import ExactShape
from dynaxla.errors import FrozenError, UnsupportedError
from dynaxla.observe.compile_timing import Spent
from dynaxla.pipeline import Pipeline
from dynaxla.programs.compile_part import find, find_fold, make, make_fold
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import Made, Program
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.programs.specialization import AtBucket, AtSizes, Place
from dynaxla.runtime.client import Buffer, Executable, OnDevice
from dynaxla.runtime.padding import PaddedShape, pad, plain
from dynaxla.runtime.weight_residency import Held, WriteWatch, picker
from dynaxla.torch_api.gc_guard import no_collection

logger = logging.getLogger("dynaxla")

PartFunction = Callable[[Sequence[Any]], list[Any]]


class CompiledPart:
    """One compiled part of a graph: a table from sizes or buckets to programs, and the weights they share.

    Calling it gives the part's outputs for the caller's arguments (tensors and plain integers). Safe from several
    threads, which compile different programs side by side. A call that needs a new program compiles it and may raise what
    `Pipeline.compile` raises, before anything ran; where programs are compiled behind the calls it runs at once in what
    there is, and once frozen it does what its gate says.

    Args:
        gate: finds the gate of the compiled function that is being called.
        behind: compiles behind the calls.
    """

    def __init__(
        self,
        graphs: PartGraphs,
        pipeline: Pipeline,
        watch: WriteWatch,
        policies: Policies,
        gate: Callable[[], FunctionPolicy],
        behind: CompileService,
    ) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._gate = gate
        self._pick_weights = picker(graphs.weights)
        facts, fold = graphs.facts, self._compile_fold if graphs.facts.folds else None
        held = Held(facts.constants, facts.orders, facts.kept, facts.folded, fold)
        self._residency = pipeline.client.hold(watch, held)
        self._fold: Executable | None = None
        learns = pipeline.options.buckets == "learned" and not policies.chosen
        self._crowd = Crowd(pipeline.options, chosen=policies.chosen or learns)
        bucketed = bool(graphs.sizes) and pipeline.options.bucketing != "off"
        sizing = graphs.find_sizing(policies) if bucketed else None
        self._programs = ProgramCache(self._crowd, pipeline.recorder, pipeline.options.max_executables)
        self._keys = Keys(graphs.sizes, sizing, self._programs.keys)
        if bucketed and sizing is None:
            self._report(
                ExactShape("the graph", "a size that varies does not follow from any one of its inputs' sizes")
            )
        self._wants = PartCompileClient(self, graphs, pipeline, self._keys, behind)
        self._recaller = ProgramPrefetcher(self, graphs, pipeline, self._keys, behind)
        self._learner = self._new_learner(behind) if learns and sizing is not None else None
        self._counts = pipeline.options.compile == "behind"
        self._is_new = True
        self._to_buffer = pipeline.client.to_buffer
        self._to_tensor = pipeline.client.to_tensor
        self._on_device = pipeline.client if isinstance(pipeline.client, OnDevice) else None
        device = self._on_device
        self._to_plain = self._plain if device is None else self._to_buffer
        self._to_padded = self._pad if device is None else device.to_padded
        self._cropped = None if device is None else device.cropped
        if graphs.are_known:  # its programs may be on disk, and nothing has to be captured before the first call
            self._recaller.start_ahead()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        keys = self._keys
        values = keys.read(args)
        key = keys.of(values)
        if self._learner is not None:
            self._learner.count(values)
        program = self._programs.get(key)
        if program is None:
            return self._miss(key, values, args)
        if key:
            self._programs.mark_used(key)
        if self._counts:
            self._pipeline.recorder.count_own()
        return self._run(program, values, args)

    def _run(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        if (cropping := program.cropping) is not None:
            values = cropping.pick(values)
        tensors: list[torch.Tensor] = []
        if program.executable is not None:
            buffers: list[Buffer] = list(self._residency.buffers(self._pick_weights(args)))
            for position, order, padded in program.inputs:
                tensor = args[position] if order is None else args[position].permute(order)
                buffers.append(self._to_plain(tensor) if padded is None else self._to_padded(tensor, padded))
            if cropping is not None:
                buffers.extend(map(self._to_buffer, cropping.vectors(values)))
            if program.donated and self._on_device is not None:
                tensors = self._on_device.run_donating(program, args, buffers)
            else:
                tensors = [self._to_tensor(result) for result in program.executable.run(buffers)]
        outputs = [source.output(tensors, args) for source in program.outputs]
        return outputs if cropping is None else cropping.crop(outputs, values, self._cropped)

    def _plain(self, tensor: torch.Tensor) -> Buffer:
        return self._to_buffer(plain(tensor))

    def _pad(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        return self._plain(pad(tensor, padded))

    def _miss(self, key: Key, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        """A call whose own program is not there.

        Raises:
            FrozenError: the part may not compile, and `on_miss` is "error".
        """
        gate = self._gate()
        on_miss = gate.on_miss
        behind = on_miss == "background" or (on_miss == "compile" and (self._counts or gate.waits is False))
        if on_miss == "compile" and not behind:
            with no_collection():
                results = self._run(self.make(key, values, args), values, args)
            self._recaller.start()
            return results
        if on_miss != "compile":
            self._pipeline.recorder.add(misses=1)
        if on_miss == "error":
            ready = ", ".join(map(str, self._programs)) or "none"
            raise FrozenError(f"a call needs a program for the sizes {key}; there are: {ready}")
        if behind:
            job = self._wants.ask(key, values, args, awaited=bool(gate.waits))
            if job is not None and gate.waits:
                job.ended.wait()
                now = self._keys.of(values)
                if now in self._programs or now != key:  # the same sizes may be wanted otherwise by now
                    return self(args)
        return self._run_instead(values, args, may_pad=on_miss != "eager", measured=behind)

    def _run_instead(self, values: tuple[int, ...], args: Sequence[Any], *, may_pad: bool, measured: bool) -> list[Any]:
        """Runs in the smallest program whose bucket holds the call's sizes, or in eager.

        Args:
            may_pad: whether such a program may serve.
            measured: whether it has to be cheaper than eager for that.
        """
        costs, elements = self._wants.costs, self._keys.elements(values)
        padded, key = next(iter(self._keys.larger(values) if may_pad else ()), (0, ()))
        program = self._programs.get(key) if padded else None
        if program is not None and measured and not costs.prefers_program(key, padded, elements):
            program = None
        started = time.perf_counter()
        if program is None:
            self._pipeline.recorder.add(served_eager=1)
            results = self._graphs.run_eager(args)
            costs.note_eager(elements, time.perf_counter() - started)
        else:
            self._programs.mark_used(key)
            self._pipeline.recorder.add(served_larger=1)
            results = self._run(program, values, args)
            costs.note_program(key, time.perf_counter() - started)
        return results

    def make(self, key: Key, values: tuple[int, ...], args: Sequence[Any]) -> Program:
        """The program of a call's sizes, compiled in this thread unless another one just did.

        Args:
            args: the call's, or tensors like them.
        """
        with self._programs.turn(key):
            # Another thread may just have found out that the part cannot be padded.
            now = self._keys.of(values)
            found = self._programs.get(now)
            if found is not None:
                return found
            spent = Spent(capture_s=self._pipeline.origin.take_capture_s())
            made = self._make_padded(now, spent)
            if made is None:
                made = make(self._graphs, self._pipeline, AtSizes(args), spent)
                now = self._keys.of(values)
            spent.tell(self._pipeline.origin.what, self._why(now))
            program = self._graphs.facts.bind(made)
            self._keep(now, program, values)
            return program

    def _new_learner(self, behind: CompileService) -> AdaptiveBuckets:
        pipeline = self._pipeline
        most = max(1, pipeline.options.max_executables * 3 // 4)  # the rest is for sizes that no plan has
        return AdaptiveBuckets(
            self._wants, self._keys, behind, pipeline.recorder, most, self._graphs.graph, pipeline.kept.store
        )

    def _why(self, key: Key) -> str:
        """Why a program was compiled, for the log."""
        new, self._is_new = self._is_new, False
        exact = key[:1] == (EXACT,)
        sizes = ", ".join(map(str, key[1:] if exact else self._keys.bucket_of(key)))
        why = f"a new {'exact shape' if exact else 'bucket'} of sizes {sizes}"
        if new or not key:
            why = "a new graph"
        return f"{why}; {self._crowd.refused}" if exact and self._crowd.refused is not None else why

    def _keep(self, key: Key, program: Program, values: tuple[int, ...]) -> None:
        for dropped in self._programs.keep(key, program, self._keys):
            self._wants.costs.forget(dropped)
        self._recaller.note(values)

    def _make_padded(self, key: Key, spent: Spent) -> Made | None:
        """The program of a bucket; None if it is none, or if padding could change a result."""
        place = self._place(key)
        if place is None:
            return None
        try:
            return make(self._graphs, self._pipeline, place, spent)
        except CannotPad as error:
            self.refuse(key, error.reason, of_bucket=error.of_bucket)
            return None

    def _place(self, key: Key) -> Place | None:
        """The bucket of a key; None for exact sizes."""
        sizing = self._keys.sizing_of(key)
        return None if sizing is None else AtBucket(sizing.at(self._keys.bucket_of(key)), sizing.order)

    # What is found behind the calls

    @property
    def fold_is_missing(self) -> bool:
        """Whether work on weights alone is split off whose program is not there."""
        return bool(self._graphs.facts.folds) and self._fold is None

    def keep_fold(self, fold: Executable) -> None:
        self._fold = fold

    def keep_made(self, key: Key, made: Made, values: tuple[int, ...]) -> None:
        self._keep(key, self._graphs.facts.bind(made), values)

    def recall(self, key: Key, values: tuple[int, ...], arguments: Sequence[Any]) -> bool:
        """Whether the program of these sizes is there, or was on disk and now is.

        Raises:
            CompileError: it cannot be loaded.
        """
        place = self._place(key) or AtSizes(arguments)
        with self._programs.turn(key):
            if key in self._programs:
                return True
            if self.fold_is_missing:
                self._fold = find_fold(self._graphs, self._pipeline)
            made = None if self.fold_is_missing else find(self._graphs, self._pipeline, place)
            if made is not None:
                self.keep_made(key, made, values)
        return made is not None

    def refuse(self, key: Key, reason: ExactShape, *, of_bucket: bool) -> None:
        """Compiles these sizes exactly from now on.

        Raises:
            UnsupportedError: the options want everything padded.
        """
        self._report(reason)
        if of_bucket:
            self._keys.exclude(key)
        else:
            self._keys.exclude_sizing(key)

    def _report(self, reason: ExactShape) -> None:
        if self._pipeline.options.bucketing == "require":
            raise UnsupportedError(reasons=(reason,))
        self._crowd.refused = reason
        self._pipeline.recorder.note_exact_shape(str(reason))
        logger.warning("%s", reason)

    def _compile_fold(self) -> Executable:
        if self._fold is None:
            spent = Spent()
            self._fold = make_fold(self._graphs, self._pipeline, spent)
            spent.tell(self._pipeline.origin.what, "work on weights alone")
        return self._fold
