"""The graphs of a compiled part, and what each becomes at one set of sizes or at one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.bucketing.cropping import Cropping
from dynaxla.bucketing.padding import pad_graph
from dynaxla.bucketing.part import sizing_of_part
from dynaxla.bucketing.ruling import PadRules
from dynaxla.bucketing.sizing import Buckets, Policies, SizeSource, Sizing
from dynaxla.cache.key import Key
from dynaxla.capture.donation import donated_arguments
from dynaxla.capture.editing import tolerate_strides
from dynaxla.capture.fold import split_weight_work
from dynaxla.capture.listing import CannotList, graph_listing
from dynaxla.capture.specialize import specialize
from dynaxla.runtime.client import Executable
from dynaxla.runtime.padded import PaddedShape
from dynaxla.stages import DONATED, OutputSource, Saved, StaticGraph


@dataclass(frozen=True, slots=True)
class Donated:
    """An argument whose memory an executable takes for its new value.

    Attributes:
        position: of the tensor among the caller's arguments.
        argument: of the executable.
        result: its new value.
        order: permutes the result to the tensor's dims; None: it has them.
    """

    position: int
    argument: int
    result: int
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Program:
    """A part at one set of sizes or at one bucket, compiled.

    Attributes:
        executable: None if every output is an argument or a plain value: nothing to compute, nothing compiled.
        inputs: for every argument that is not resident: its position, the permutation that makes it row-major, and what
            the result of that is padded to.
        outputs: where each output of the part comes from.
        cropping: what is real of the outputs; None where nothing is padded.
        donated: arguments whose memory the executable takes for their new values; outputs name these by the argument.
    """

    executable: Executable | None
    inputs: tuple[tuple[int, tuple[int, ...] | None, PaddedShape | None], ...]
    outputs: tuple[OutputSource, ...]
    cropping: Cropping | None = None
    donated: tuple[Donated, ...] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a part at one bucket or at one set of sizes beside its executable.

    Attributes:
        orders: for each argument of the executable the permutation that makes the caller's tensor row-major, or None.
        outputs: where each output of the part comes from.
        shapes: what the free tensors are padded to; empty where nothing is padded.
        cropping: what is real of the outputs; None where nothing is padded.
        donated: the arguments of the executable whose memory it takes, each with the result that is the new value.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[OutputSource, ...]
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    cropping: Cropping | None = None
    donated: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A part at one bucket or at one set of sizes, compiled in whatever process.

    Attributes:
        executable: None if there is nothing to compute.
    """

    executable: Executable | None
    outline: Outline


class PartGraphs:
    """The graphs of one part: what its weights alone determine, and the rest, to be specialized per call sizes.

    Args:
        module: a functional graph with `meta["val"]` on every node; its last placeholders are the constants.
        weights: positions of the inputs that keep their values between most calls.
        constants: values of the last placeholders, which never change.
        fold: whether weight-only work is split off.
        pads: the pad rules of ops.
        saved: what a forward keeps for the backward alone.
    """

    def __init__(
        self,
        module: GraphModule,
        weights: Sequence[int],
        constants: Sequence[torch.Tensor],
        fold: bool,
        pads: PadRules,
        saved: Saved = Saved(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._module = module
        self._pads = pads
        self.saved = saved
        self._fold = fold
        self._in_eager: Callable[[Sequence[Any]], list[Any]] | None = None
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        given = len(placeholders) - len(constants)
        self.weights = tuple(weights)
        self.constants = tuple(constants)
        self.held = [placeholders[i] for i in weights] + placeholders[given:]
        self.split = split_weight_work(module, self.held, fold)
        self._free = [i for i in range(given) if i not in set(weights)]
        free = [placeholders[position].meta["val"] for position in self._free]
        self._free_tensors = [i for i, value in enumerate(free) if isinstance(value, torch.Tensor)]
        marked = (placeholders[self._free[i]].meta.get(DONATED) for i in self._free_tensors)
        self.donations = {i: place for i, place in enumerate(marked) if place is not None}
        self._held_origins: list[int | torch.Tensor | None] = [*self.weights, *self.constants]
        self.sizes = _size_sources(placeholders, self._free)

    @property
    def graph(self) -> Graph:
        """All of the part, symbolic."""
        return self._module.graph

    @cached_property
    def name(self) -> str | None:
        """A digest of all that its programs are made of, the same in every process; None where that cannot be said.

        The records of the ops are not in it.
        """
        try:
            listing = graph_listing(self.graph)
        except CannotList:
            return None
        about = {"weights": self.weights, "constants": len(self.constants), "fold": self._fold, "saved": self.saved}
        if self.donations:
            about["donations"] = sorted(self.donations.items())
        return Key.of(graph=listing, **about).digest

    def find_sizing(self, policies: Policies) -> Sizing | None:
        """Where the sizes that vary are read and what their buckets are; None if that cannot be said."""
        origins = [origin if isinstance(origin, int) else None for origin in self._origins()]
        return sizing_of_part(self.split.main.graph, origins, policies, self._pads)

    def run_eager(self, args: Sequence[Any]) -> list[Any]:
        """The part's outputs by eager PyTorch."""
        if self._in_eager is None:
            self._in_eager = in_eager(self._module, self.saved)
        return self._in_eager([*args, *self.constants])

    def specialize(self, args: Sequence[Any]) -> StaticGraph:
        """The part at the sizes of these arguments."""
        return specialize(self.split.main.graph, self._example_arguments(args) if self.sizes else None)

    def specialize_fold(self) -> Graph | None:
        """The weight-only graph, or None."""
        fold = self.split.fold
        return None if fold is None else specialize(fold, None).graph

    def pad(
        self, buckets: Buckets, order: Sequence[sympy.Symbol]
    ) -> tuple[StaticGraph, tuple[tuple[int, ...] | None, ...], Cropping]:
        """The part at a bucket: its program, the shapes its free tensors are padded to, and what is real of its outputs.

        Args:
            order: of the symbols in a call's values.

        Raises:
            CannotPad: padding could change a result.
        """
        main = self.split.main
        padded = pad_graph(main.graph, buckets, _device(main), self._pads, self.saved.outputs)
        cropping = Cropping.of(padded, order)
        return specialize(padded.graph, None), padded.padded[-len(self._free) :] if self._free else (), cropping

    def bind(self, made: Made) -> Program:
        """A program whose inputs and outputs speak of the caller's arguments."""
        origins, outline = self._origins(), made.outline
        first = len(origins) - len(self._free)
        orders = outline.orders[first : first + len(self._free_tensors)]
        inputs = tuple(
            (self._free[i], order, _padded_shape(outline.shapes[i], order) if outline.shapes else None)
            for i, order in zip(self._free_tensors, orders, strict=True)
        )
        taken = {result: self._free[self._free_tensors[argument - first]] for argument, result in outline.donated}
        outputs = tuple(
            OutputSource(argument=taken[source.result]) if source.result in taken else _resolve(source, origins)
            for source in outline.outputs
        )
        returns = {source.result: source.order for source in outline.outputs}
        donated = tuple(
            Donated(taken[result], argument, result, returns[result]) for argument, result in outline.donated
        )
        return Program(made.executable, inputs, outputs, outline.cropping, donated)

    def donated(self, static: StaticGraph, shapes: Sequence[tuple[int, ...] | None]) -> tuple[tuple[int, int], ...]:
        """The arguments of a program whose memory it may take, each with its result; nothing that is padded.

        Args:
            shapes: what the free tensors are padded to; empty where nothing is padded.
        """
        first = len(self._origins()) - len(self._free)
        whole = {i: place for i, place in self.donations.items() if not shapes or shapes[self._free_tensors[i]] is None}
        return donated_arguments(static, {first + i: place for i, place in whole.items()})

    def _origins(self) -> list[int | torch.Tensor | None]:
        """For each placeholder of the rest: the caller's position, or the constant, or None for a folded value."""
        folded = len(self.split.fold.output_node().args[0]) if self.split.fold is not None else 0  # type: ignore
        return [*(self._held_origins[i] for i in self.split.kept), *[None] * folded, *self._free]

    def _example_arguments(self, args: Sequence[Any]) -> list[Any]:
        return [
            args[origin] if isinstance(origin, int) else node.meta["val"]
            for origin, node in zip(self._origins(), _placeholders(self.split.main), strict=True)
        ]


def in_eager(module: GraphModule, saved: Saved) -> Callable[[Sequence[Any]], list[Any]]:
    """What gives a graph's outputs for its inputs by eager PyTorch, which takes inputs of other strides, too."""
    graph = copied(module.graph)
    tolerate_strides(graph)
    forward = GraphModule(module, graph).forward

    def run(args: Sequence[Any]) -> list[Any]:
        results = forward(*(without_gaps(args) if saved.inputs else args))
        return list(results) if isinstance(results, (tuple, list)) else [results]

    return run


def copied(graph: Graph) -> Graph:
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def without_gaps(args: Sequence[Any]) -> Sequence[Any]:
    """A backward's arguments as eager ops may read them: what lies in padded memory is brought together."""
    return [_together(value) if isinstance(value, torch.Tensor) else value for value in args]


def _together(tensor: torch.Tensor) -> torch.Tensor:
    dense = torch.empty_like(tensor)  # in the same order of dims
    return tensor if dense.stride() == tensor.stride() else dense.copy_(tensor)


def _padded_shape(sizes: Sequence[int] | None, order: Sequence[int] | None) -> PaddedShape | None:
    if sizes is None:
        return None
    return PaddedShape.of(sizes if order is None else [sizes[d] for d in order])


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


def _size_sources(placeholders: Sequence[Node], free: Sequence[int]) -> list[SizeSource]:
    """Where to read every distinct symbolic size."""
    sources: dict[str, SizeSource] = {}
    for position in free:
        value = placeholders[position].meta["val"]
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if not isinstance(size, int):
                    sources.setdefault(str(size), SizeSource(position, dim))
        else:
            sources[str(value)] = SizeSource(position, None)
    return list(sources.values())
