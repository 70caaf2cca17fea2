"""Every call: sizes -> bucket -> executable -> pad, run, crop. What can be decided once is decided in `__init__`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.bucketing.cropping import Cropping
from dynaxla.bucketing.padding import CannotPad, pad_graph
from dynaxla.bucketing.plan import BucketPlan, Policies, plan_part
from dynaxla.capture.fold import split_weight_work
from dynaxla.capture.specialize import row_major_order, specialize
from dynaxla.errors import UnsupportedError
from dynaxla.pipeline import Pipeline
from dynaxla.reasons import ExactShape
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.residency import Residency, WriteWatch
from dynaxla.stages import OutputSource, StaticGraph

logger = logging.getLogger("dynaxla")

_EXACT = -1

PartFunction = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Program:
    """A part at one set of sizes or at one bucket, compiled.

    Attributes:
        executable: None if every output is an argument or a plain value: nothing to compute, nothing compiled.
        inputs: for every argument that is not resident: its position, the permutation that makes it row-major, and the
            shape it is padded to.
        outputs: where each output of the part comes from.
        cropping: what is real of the outputs; None where nothing is padded.
    """

    executable: Executable | None
    inputs: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None], ...]
    outputs: tuple[OutputSource, ...]
    cropping: Cropping | None = None


class PartGraphs:
    """The graphs of one part: what its weights alone determine, and the rest, to be specialized per call sizes.

    Args:
        module: a functional graph with `meta["val"]` on every node; its last placeholders are the constants.
        weights: positions of the inputs that keep their values between most calls.
        constants: values of the last placeholders, which never change.
        fold: whether weight-only work is split off.
    """

    def __init__(
        self, module: GraphModule, weights: Sequence[int], constants: Sequence[torch.Tensor], fold: bool
    ) -> None:
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        given = len(placeholders) - len(constants)
        self.weights = tuple(weights)
        self.constants = tuple(constants)
        self.held = [placeholders[i] for i in weights] + placeholders[given:]
        self.split = split_weight_work(module, self.held, fold)
        self._free = [i for i in range(given) if i not in set(weights)]
        self._held_origins: list[int | torch.Tensor | None] = [*self.weights, *self.constants]
        self.sizes = _size_sources(placeholders, self._free)

    def plan_buckets(self, policies: Policies) -> BucketPlan | None:
        """Where the sizes that vary are read and what their buckets are; None if that cannot be said."""
        origins = [origin if isinstance(origin, int) else None for origin in self._origins()]
        return plan_part(_placeholders(self.split.main), origins, policies)

    def specialize(self, args: Sequence[Any]) -> StaticGraph:
        """The part at the sizes of these arguments."""
        return specialize(self.split.main, self._example_arguments(args) if self.sizes else None)

    def specialize_fold(self) -> Graph | None:
        """The weight-only graph, or None."""
        fold = self.split.fold
        return None if fold is None else specialize(GraphModule(self.split.main, fold), None).graph

    def pad(self, plan: BucketPlan, bucket: Sequence[int]) -> tuple[StaticGraph, tuple[Any, ...], Cropping]:
        """The part at a bucket: its program, the shapes its free tensors are padded to, and what is real of its outputs.

        Raises:
            CannotPad: padding could change a result.
        """
        padded = pad_graph(self.split.main, plan.at(bucket), _device(self.split.main))
        cropping = Cropping.of(padded, plan)
        return specialize(padded.module, None), padded.padded[-len(self._free) :] if self._free else (), cropping

    def bind(
        self,
        static: StaticGraph,
        executable: Executable | None,
        args: Sequence[Any],
        shapes: Sequence[tuple[int, ...] | None] = (),
        cropping: Cropping | None = None,
    ) -> Program:
        """A program whose inputs and outputs speak of the caller's arguments."""
        origins = self._origins()
        tensors = [i for i, position in enumerate(self._free) if isinstance(args[position], torch.Tensor)]
        first = len(origins) - len(self._free)
        orders = static.argument_orders[first : first + len(tensors)]
        inputs = tuple(
            (self._free[i], order, shapes[i] if shapes else None) for i, order in zip(tensors, orders, strict=True)
        )
        outputs = tuple(_resolve(source, origins) for source in static.outputs)
        return Program(executable, inputs, outputs, cropping)

    def _origins(self) -> list[int | torch.Tensor | None]:
        """For each placeholder of the rest: the caller's position, or the constant, or None for a folded value."""
        folded = len(self.split.fold.output_node().args[0]) if self.split.fold is not None else 0  # type: ignore
        return [*(self._held_origins[i] for i in self.split.kept), *[None] * folded, *self._free]

    def _example_arguments(self, args: Sequence[Any]) -> list[Any]:
        return [
            args[origin] if isinstance(origin, int) else node.meta["val"]
            for origin, node in zip(self._origins(), _placeholders(self.split.main), strict=True)
        ]


class CompiledPart:
    """One compiled part of a graph: a table from sizes or buckets to programs, and the weights they share.

    Calling it gives the part's outputs for the caller's arguments (tensors and plain integers). Safe from several
    threads. A call that needs a new program compiles it and may raise what `Pipeline.compile` raises, before anything ran.
    """

    def __init__(self, graphs: PartGraphs, pipeline: Pipeline, watch: WriteWatch, policies: Policies) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._weights = graphs.weights
        self._sizes = graphs.sizes
        self._residency = Residency(
            pipeline.client,
            watch,
            constants=graphs.constants,
            orders=[row_major_order(node.meta["val"]) for node in graphs.held],
            kept=graphs.split.kept,
            folded=graphs.split.folded,
            compile_fold=None if graphs.split.fold is None else self._compile_fold,
        )
        bucketed = bool(graphs.sizes) and pipeline.options.bucketing != "off"
        self._plan = graphs.plan_buckets(policies) if bucketed else None
        if bucketed and self._plan is None:
            self._report(
                ExactShape("the graph", "a size that varies is not among its inputs' sizes, nor a fraction of one")
            )
        self._programs: OrderedDict[tuple[int, ...], Program] = OrderedDict()
        self._lock = threading.RLock()
        self._to_buffer = pipeline.client.to_buffer
        self._to_tensor = pipeline.client.to_tensor

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        key = self._key(args) if self._sizes else ()
        program = self._programs.get(key) or self._compile(key, args)
        if key:
            self._mark_used(key)
        cropping = program.cropping
        values = () if cropping is None else cropping.read(args)
        tensors: list[torch.Tensor] = []
        if program.executable is not None:
            buffers: list[Buffer] = list(self._residency.buffers([args[i] for i in self._weights]))
            for position, order, shape in program.inputs:
                tensor = args[position] if shape is None else _pad(args[position], shape)
                buffers.append(self._to_buffer(_row_major(tensor, order)))
            if cropping is not None and cropping.takes_sizes:
                buffers.append(self._to_buffer(torch.tensor(values)))
            tensors = [self._to_tensor(result) for result in program.executable.run(buffers)]
        outputs = [_output(source, tensors, args) for source in program.outputs]
        return outputs if cropping is None else cropping.crop(outputs, values)

    def _key(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The call's bucket, or its sizes behind a -1: exact sizes are never taken for a bucket of other symbols."""
        plan = self._plan
        if plan is not None:
            return plan.bucket([source.read(args) for source in plan.sources])
        return (_EXACT, *[args[i] if dim is None else args[i].shape[dim] for i, dim in self._sizes])

    def _mark_used(self, key: tuple[int, ...]) -> None:
        # Another thread may just have dropped it; this call has its program all the same.
        with contextlib.suppress(KeyError):
            self._programs.move_to_end(key)

    def _compile(self, key: tuple[int, ...], args: Sequence[Any]) -> Program:
        with self._lock:
            if self._sizes:
                key = self._key(args)  # another thread may just have found out that the part cannot be padded
            found = self._programs.get(key)
            if found is not None:
                return found
            program = self._compile_padded(key, args) if self._plan is not None else None
            if program is None:
                program = self._compile_exact(args)
                key = self._key(args) if self._sizes else ()
            self._programs[key] = program
            while len(self._programs) > self._pipeline.options.max_executables:
                self._programs.popitem(last=False)
                self._pipeline.recorder.add(evictions=1)
            return program

    def _compile_padded(self, bucket: tuple[int, ...], args: Sequence[Any]) -> Program | None:
        """The program of a bucket; None, from now on, if padding could change a result."""
        assert self._plan is not None
        try:
            static, shapes, cropping = self._graphs.pad(self._plan, bucket)
        except CannotPad as error:
            self._report(error.reason)
            self._plan = None
            return None
        executable = self._pipeline.compile(static.graph) if _computes(static) else None
        return self._graphs.bind(static, executable, args, shapes, cropping)

    def _compile_exact(self, args: Sequence[Any]) -> Program:
        static = self._graphs.specialize(args)
        executable = self._pipeline.compile(static.graph) if _computes(static) else None
        return self._graphs.bind(static, executable, args)

    def _report(self, reason: ExactShape) -> None:
        if self._pipeline.options.bucketing == "require":
            raise UnsupportedError(reasons=(reason,))
        self._pipeline.recorder.note_exact_shape(str(reason))
        logger.warning("%s", reason)

    def _compile_fold(self) -> Executable:
        graph = self._graphs.specialize_fold()
        assert graph is not None
        return self._pipeline.compile(graph, fold=True)


def _resolve(source: OutputSource, origins: Sequence[int | torch.Tensor | None]) -> OutputSource:
    """Names an argument by the caller's position instead of the split graph's."""
    if source.argument is None:
        return source
    origin = origins[source.argument]
    return OutputSource(value=origin) if isinstance(origin, torch.Tensor) else replace(source, argument=origin)


def _placeholders(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _device(module: GraphModule) -> torch.device:
    values = [n.meta.get("val") for n in module.graph.nodes]
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _size_sources(placeholders: Sequence[Node], free: Sequence[int]) -> list[tuple[int, int | None]]:
    """Where to read every distinct symbolic size: (argument, dim), or (argument, None) for an integer argument."""
    sources: dict[str, tuple[int, int | None]] = {}
    for position in free:
        value = placeholders[position].meta["val"]
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if not isinstance(size, int):
                    sources.setdefault(str(size), (position, dim))
        else:
            sources[str(value)] = (position, None)
    return list(sources.values())


def _computes(static: StaticGraph) -> bool:
    return any(source.result is not None for source in static.outputs)


def _pad(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in the corner of a larger one; what the rest holds is nobody's business."""
    if tensor.shape == shape:
        return tensor
    padded = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    region = padded
    for dim, size in enumerate(tensor.shape):
        region = region.narrow(dim, 0, size)
    region.copy_(tensor)
    return padded


def _row_major(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor's values as row-major memory; a view of its own memory unless its strides changed or bits are lazy."""
    if order is not None:
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor


def _output(source: OutputSource, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    if source.result is not None:
        tensor = tensors[source.result]
        return tensor if source.order is None else tensor.permute(source.order)
    return source.value if source.argument is None else args[source.argument]
