"""Every call: sizes -> bucket -> executable -> pad, run, crop. What can be decided once is decided in `__init__`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaxla.bucketing.crowding import Crowd
from dynaxla.bucketing.keys import EXACT, Key, Keys
from dynaxla.bucketing.padding import CannotPad
from dynaxla.bucketing.sizing import Policies
from dynaxla.capture.specialize import row_major_order
from dynaxla.errors import DynaxlaError, FrozenError, UnsupportedError
from dynaxla.freezing import Gate
from dynaxla.isolation.forking import follow, new_lock
from dynaxla.observe.spent import Spent
from dynaxla.pipeline import Pipeline
from dynaxla.programs import PaddedShape, PartGraphs, Program
from dynaxla.reasons import ExactShape
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.residency import Residency, WriteWatch
from dynaxla.stages import OutputSource, StaticGraph

logger = logging.getLogger("dynaxla")

PartFunction = Callable[[Sequence[Any]], list[Any]]


class CompiledPart:
    """One compiled part of a graph: a table from sizes or buckets to programs, and the weights they share.

    Calling it gives the part's outputs for the caller's arguments (tensors and plain integers). Safe from several
    threads, which compile different programs side by side. A call that needs a new program compiles it and may raise what
    `Pipeline.compile` raises, before anything ran; once frozen it does what its gate says instead.

    Args:
        gate: finds the gate of the compiled function that is being called.
    """

    def __init__(
        self,
        graphs: PartGraphs,
        pipeline: Pipeline,
        watch: WriteWatch,
        policies: Policies,
        gate: Callable[[], Gate],
    ) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._gate = gate
        self._weights = graphs.weights
        self._residency = Residency(
            pipeline.client,
            watch,
            constants=graphs.constants,
            orders=[row_major_order(node.meta["val"]) for node in graphs.held],
            kept=graphs.split.kept,
            folded=graphs.split.folded,
            compile_fold=None if graphs.split.fold is None else self._compile_fold,
        )
        self._crowd = Crowd(pipeline.options, chosen=policies.chosen)
        bucketed = bool(graphs.sizes) and pipeline.options.bucketing != "off"
        sizing = graphs.find_sizing(policies) if bucketed else None
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._keys = Keys(graphs.sizes, sizing, self._programs.keys)
        if bucketed and sizing is None:
            self._report(
                ExactShape("the graph", "a size that varies is not among its inputs' sizes, nor a fraction of one")
            )
        self._turns: dict[Key, threading.Lock] = {}
        self._behind: set[Key] = set()
        self._is_new = True
        self._lock = new_lock()
        self._to_buffer = pipeline.client.to_buffer
        self._to_tensor = pipeline.client.to_tensor
        follow(self)

    def after_fork(self) -> None:
        self._behind.clear()  # the threads that compile behind the calls are the parent's

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        keys = self._keys
        values = keys.read(args)
        key = keys.of(values)
        program = self._programs.get(key) or self._missed(key, values, args)
        if program is None:
            return self._graphs.run_eager(args)
        if key:
            self._mark_used(key)
        cropping = program.cropping
        if cropping is not None:
            values = cropping.pick(values)
        tensors: list[torch.Tensor] = []
        if program.executable is not None:
            buffers: list[Buffer] = list(self._residency.buffers([args[i] for i in self._weights]))
            for position, order, padded in program.inputs:
                tensor = args[position] if order is None else args[position].permute(order)
                buffers.append(self._to_buffer(_plain(tensor if padded is None else _pad(tensor, padded))))
            if cropping is not None:
                buffers.extend(map(self._to_buffer, cropping.vectors(values)))
            tensors = [self._to_tensor(result) for result in program.executable.run(buffers)]
        outputs = [_output(source, tensors, args) for source in program.outputs]
        return outputs if cropping is None else cropping.crop(outputs, values)

    def _mark_used(self, key: Key) -> None:
        # Another thread may just have dropped it; this call has its program all the same.
        with contextlib.suppress(KeyError):
            self._programs.move_to_end(key)

    def _missed(self, key: Key, values: Sequence[int], args: Sequence[Any]) -> Program | None:
        """The program of a call whose own is not there; None if the call is to run in eager.

        Raises:
            FrozenError: the part may not compile, and `on_miss` is "error".
        """
        gate = self._gate()
        on_miss = gate.on_miss
        if on_miss == "compile":
            return self._compile(key, args)
        self._pipeline.recorder.add(misses=1)
        if on_miss == "error":
            ready = ", ".join(map(str, self._programs)) or "none"
            raise FrozenError(f"a call needs a program for the sizes {key}; there are: {ready}")
        if on_miss == "background":
            self._compile_behind(gate, key, list(args))
        return None if on_miss == "eager" else self._larger(values)

    def _larger(self, values: Sequence[int]) -> Program | None:
        """The smallest program whose bucket holds the call's sizes."""
        ready = self._keys.larger(values)
        return self._programs.get(ready[0]) if ready else None

    def _compile_behind(self, gate: Gate, key: Key, args: Sequence[Any]) -> None:
        with self._lock:
            if key in self._behind:
                return
            self._behind.add(key)

        def compile_quietly() -> None:
            try:
                self._compile(key, args)
            except Exception as error:  # the border of what nobody waits for, see partition/boundary.py
                unexpected = None if isinstance(error, DynaxlaError) else error
                logger.warning("the sizes %s stay without a program of their own: %s", key, error, exc_info=unexpected)
            else:
                self._behind.discard(key)  # it may be dropped for others, and wanted again

        gate.run_behind(compile_quietly)

    def _compile(self, key: Key, args: Sequence[Any]) -> Program:
        """The program of a call's sizes, compiled unless another thread just did."""
        with self._lock:
            turn = self._turns.setdefault(key, new_lock())
        with turn:
            # Another thread may just have found out that the part cannot be padded.
            now = self._keys.of(self._keys.read(args))
            found = self._programs.get(now)
            if found is not None:
                return found
            spent = Spent(capture_s=self._pipeline.origin.take_capture_s())
            program = self._compile_padded(now, args, spent)
            if program is None:
                program = self._compile_exact(args, spent)
                now = self._keys.of(self._keys.read(args))
            spent.tell(self._pipeline.origin.what, self._why(now))
            with self._lock:
                self._keep(now, program)
                self._turns.pop(key, None)
            return program

    def _why(self, key: Key) -> str:
        """Why a program was compiled, for the log."""
        new, self._is_new = self._is_new, False
        exact = key[:1] == (EXACT,)
        sizes = ", ".join(map(str, key[exact:]))
        why = f"a new {'exact shape' if exact else 'bucket'} of sizes {sizes}"
        if new or not key:
            why = "a new graph"
        return f"{why}; {self._crowd.refused}" if exact and self._crowd.refused is not None else why

    def _keep(self, key: Key, program: Program) -> None:
        self._programs[key] = program
        most = self._pipeline.options.max_executables
        for notice in self._crowd.notices(list(self._programs), self._keys.describe):
            self._pipeline.recorder.note_many_programs(str(notice))
            logger.warning("%s", notice)
        while len(self._programs) > most:
            self._programs.popitem(last=False)
            self._pipeline.recorder.add(evictions=1)

    def _compile_padded(self, key: Key, args: Sequence[Any], spent: Spent) -> Program | None:
        """The program of a bucket; None if it is none, or if padding could change a result."""
        sizing = self._keys.sizing_of(key)
        if sizing is None:
            return None
        started = time.perf_counter()
        try:
            with self._pipeline.tracing:
                static, shapes, cropping = self._graphs.pad(sizing, key)
        except CannotPad as error:
            self._report(error.reason)
            if error.of_bucket:
                self._keys.exclude(key)
            else:
                self._keys.exclude_sizing(key)
            return None
        finally:
            spent.padding_s += time.perf_counter() - started
        executable = self._pipeline.compile(static.graph, spent) if _computes(static) else None
        return self._graphs.bind(static, executable, args, shapes, cropping)

    def _compile_exact(self, args: Sequence[Any], spent: Spent) -> Program:
        with self._pipeline.tracing:
            static = self._graphs.specialize(args)
        executable = self._pipeline.compile(static.graph, spent) if _computes(static) else None
        return self._graphs.bind(static, executable, args)

    def _report(self, reason: ExactShape) -> None:
        if self._pipeline.options.bucketing == "require":
            raise UnsupportedError(reasons=(reason,))
        self._crowd.refused = reason
        self._pipeline.recorder.note_exact_shape(str(reason))
        logger.warning("%s", reason)

    def _compile_fold(self) -> Executable:
        with self._pipeline.tracing:
            graph = self._graphs.specialize_fold()
        assert graph is not None
        spent = Spent()
        executable = self._pipeline.compile(graph, spent, fold=True)
        spent.tell(self._pipeline.origin.what, "work on weights alone")
        return executable


def _computes(static: StaticGraph) -> bool:
    return any(source.result is not None for source in static.outputs)


def _pad(tensor: torch.Tensor, padded: PaddedShape) -> torch.Tensor:
    """The tensor in the corner of a larger one, whose other elements may hold anything: pad rules count on nothing of them."""
    if tensor.shape == padded.sizes:
        return tensor
    if _lies_in(tensor, padded):
        # The crop of a padded result, or a part of a larger batch: what lies around it serves as padding.
        return tensor.data.as_strided(padded.sizes, padded.strides)
    made = torch.empty(padded.sizes, dtype=tensor.dtype, device=tensor.device)
    made.as_strided(tensor.shape, padded.strides).copy_(tensor)
    return made


def _lies_in(tensor: torch.Tensor, padded: PaddedShape) -> bool:
    """Whether the tensor is the corner of such a padded tensor, all of which its storage holds."""
    for size, mine, stride in zip(tensor.shape, tensor.stride(), padded.strides, strict=True):
        if mine != stride and size > 1:
            return False
    elements_from_here = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return elements_from_here >= padded.elements


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as row-major memory; a view of its own memory unless its strides changed or bits are lazy."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor


def _output(source: OutputSource, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    if source.result is not None:
        tensor = tensors[source.result]
        # Strides, and not a view: autograd lets nobody write into a view that was made while it was off.
        return tensor if source.order is None else tensor.permute(source.order).data
    return source.value if source.argument is None else args[source.argument]
