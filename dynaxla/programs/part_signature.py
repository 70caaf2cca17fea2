"""A part without its graphs: everything that a call needs whose program is loaded or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource
from dynaxla.fx.permutations import find_row_major_order
from dynaxla.programs.program import CompiledProgram, DonatedArgument, Program
from dynaxla.programs.weight_folding import WeightSplit
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.types import DONATED, OutputSource, Saved


@dataclass(frozen=True, slots=True)
class PartIdentity:
    """What another process needs of a part to find its programs.

    Attributes:
        name: a digest of everything that determines its programs; ops are in it by their names.
        scheme: where the sizes that vary are read, and their buckets; None if a size does not follow from one input's size.
    """

    name: str
    scheme: BucketScheme | None


@dataclass(frozen=True, slots=True)
class PartSignature:
    """The inputs of a part and of its programs.

    Attributes:
        weights: positions of the inputs that keep their values between most calls.
        constants: tensors of the graph, which never change.
        saved: the outputs of a forward that its backward alone reads.
        orders: for each weight and constant the permutation that makes it row-major, or None.
        kept: the weights and constants that programs read, by their index in `orders`.
        folded: those that the fold reads, by the same index.
        folds: the number of the fold's results; 0 without a fold.
        free: positions of the other inputs.
        free_tensors: the tensors among these, by their index in `free`.
        donations: for tensors whose memory a program may take, by their index in `free_tensors`, the result that is their new
            value.
        sizes: where to read every size that varies.
    """

    weights: tuple[int, ...]
    constants: tuple[torch.Tensor, ...] = field(compare=False)
    saved: Saved
    orders: tuple[tuple[int, ...] | None, ...]
    kept: tuple[int, ...]
    folded: tuple[int, ...]
    folds: int
    free: tuple[int, ...]
    free_tensors: tuple[int, ...]
    donations: Mapping[int, int]
    sizes: tuple[SizeSource, ...]

    @classmethod
    def of(
        cls,
        placeholders: Sequence[Node],
        weights: Sequence[int],
        constants: Sequence[torch.Tensor],
        split: WeightSplit,
        saved: Saved,
    ) -> PartSignature:
        """The signature of a part whose last placeholders are the constants."""
        given = len(placeholders) - len(constants)
        held = held_inputs(placeholders, weights, constants)
        free = tuple(i for i in range(given) if i not in set(weights))
        values = [placeholders[position].meta["val"] for position in free]
        tensors = tuple(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
        marked = {number: placeholders[free[i]].meta.get(DONATED) for number, i in enumerate(tensors)}
        return cls(
            weights=tuple(weights),
            constants=tuple(constants),
            saved=saved,
            orders=tuple(find_row_major_order(node.meta["val"]) for node in held),
            kept=split.kept,
            folded=split.folded,
            folds=len(split.fold.output_node().args[0]) if split.fold is not None else 0,  # type: ignore[arg-type]
            free=free,
            free_tensors=tensors,
            donations={i: place for i, place in marked.items() if place is not None},
            sizes=_size_sources(placeholders, free),
        )

    @property
    def origins(self) -> list[int | torch.Tensor | None]:
        """For each placeholder of the part without its fold: the caller's position, the constant, or None for a result of the
        fold."""
        held: list[int | torch.Tensor | None] = [*self.weights, *self.constants]
        return [*(held[i] for i in self.kept), *[None] * self.folds, *self.free]

    def bind(self, made: CompiledProgram) -> Program:
        """The program, with inputs and outputs that are numbered as the caller's arguments."""
        origins, outline = self.origins, made.outline
        first = len(origins) - len(self.free)
        orders = outline.orders[first : first + len(self.free_tensors)]
        inputs = tuple(
            (self.free[i], order, _padded_shape(outline.shapes[i], order) if outline.shapes else None)
            for i, order in zip(self.free_tensors, orders, strict=True)
        )
        taken = {result: self.free[self.free_tensors[argument - first]] for argument, result in outline.donated}
        outputs = tuple(
            OutputSource(argument=taken[source.result]) if source.result in taken else _resolve(source, origins)
            for source in outline.outputs
        )
        returns = {source.result: source.order for source in outline.outputs}
        donated = tuple(
            DonatedArgument(taken[result], argument, result, returns[result]) for argument, result in outline.donated
        )
        return Program(made.executable, inputs, outputs, outline.cropping, donated)


def held_inputs(placeholders: Sequence[Node], weights: Sequence[int], constants: Sequence[torch.Tensor]) -> list[Node]:
    """The placeholders of the weights, then of the constants."""
    return [*(placeholders[i] for i in weights), *placeholders[len(placeholders) - len(constants) :]]


def _padded_shape(sizes: Sequence[int] | None, order: Sequence[int] | None) -> PaddedShape | None:
    if sizes is None:
        return None
    return PaddedShape.of(sizes if order is None else [sizes[d] for d in order])


def _resolve(source: OutputSource, origins: Sequence[int | torch.Tensor | None]) -> OutputSource:
    """Numbers an argument by the caller's position instead of the split graph's."""
    if source.argument is None:
        return source
    origin = origins[source.argument]
    return OutputSource(value=origin) if isinstance(origin, torch.Tensor) else replace(source, argument=origin)


def _size_sources(placeholders: Sequence[Node], free: Sequence[int]) -> tuple[SizeSource, ...]:
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
    return tuple(sources.values())
