"""Crops a padded program's outputs to their true sizes. What to crop is compiled once; a call computes integers and views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from dynaxla.bucketing.padded_graph import PaddedGraph, PaddedOutput
from dynaxla.bucketing.runtime_scalars import ScalarVector
from dynaxla.bucketing.size_expressions import Size, compile_sizes
from dynaxla.types import OutputSource, restride

Sizes = Callable[..., tuple[int, ...]]
ToCorner = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Crop:
    """How one padded output is cropped to eager's result; each function takes the symbols' values.

    Attributes:
        factors: the true size of each dim of the padded result; 1 for a dim that eager expands.
        shape: eager's shape.
        strides: eager's strides.
        is_view: whether the padded result has the same dims as the output.
        saved: whether only the backward reads the output, so that its strides do not matter.
    """

    factors: Sizes
    shape: Sizes
    strides: Sizes
    is_view: bool
    saved: bool

    def apply(self, padded: torch.Tensor, values: Sequence[int], lazily: ToCorner | None) -> torch.Tensor:
        """Crops `padded` to eager's shape and strides. Copies only if the cropped tensor has other strides.

        Args:
            lazily: see `Cropping.crop`.
        """
        factors, shape = self.factors(*values), self.shape(*values)
        strides = self.strides(*values)
        if self.is_view and not self.saved and lazily is not None and padded.shape != factors:
            corner = lazily(padded, shape, strides)
            if corner is not None:
                return corner
        real = (
            padded if padded.shape == factors else padded.as_strided(factors, padded.stride(), padded.storage_offset())
        )
        if self.saved and self.is_view:
            return real.data if factors == shape else real.expand(shape).data
        if self.is_view:
            return restride(real, shape, strides)
        real = real.reshape([1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)])
        return restride(real, shape, strides)


@dataclass(frozen=True, slots=True)
class Cropping:
    """How all outputs of a padded program are cropped.

    Attributes:
        places: indices, among a call's size values, of the program's own symbols.
        given: per vector of scalars that the program takes after its tensors: its dtype, and a function from the values of the
            program's symbols to its numbers; None if the numbers are these values.
        outputs: per output: a crop, a size to compute, or None for an output that is returned as it is.
        repeated: the outputs that are an earlier one's tensor, each with that one's index.
    """

    places: tuple[int, ...]
    given: tuple[tuple[torch.dtype, Sizes | None], ...]
    outputs: tuple[Crop | Sizes | None, ...]
    repeated: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, graph: PaddedGraph, order: Sequence[sympy.Symbol]) -> Cropping:
        """Compiles the cropping of a padded graph. `order`: the symbols in the order of a call's size values."""
        outputs = tuple(_output(output, graph) for output in graph.outputs)
        places = tuple(map(order.index, graph.symbols))
        return cls(places, tuple(_computed(given, graph.symbols) for given in graph.given), outputs)

    def keep_outputs_whole(self, handed_on: Collection[int]) -> Cropping:
        """The same cropping, but the outputs with these indices are returned as they are: they are tensors of the caller's."""
        outputs = tuple(None if place in handed_on else output for place, output in enumerate(self.outputs))
        return replace(self, outputs=outputs)

    def share_repeated(self, sources: Sequence[OutputSource]) -> Cropping:
        """The same cropping, but outputs of one source are one tensor, cropped once: eager gives a tensor twice, too.

        Args:
            sources: of all outputs.
        """
        first: dict[tuple[OutputSource, bool], int] = {}
        repeated = []
        for place, (source, output) in enumerate(zip(sources, self.outputs, strict=True)):
            if isinstance(output, Crop) and source.result is not None:
                earlier = first.setdefault((source, output.saved), place)
                if earlier != place:
                    repeated.append((place, earlier))
        again = {place for place, _ in repeated}
        outputs = tuple(None if place in again else output for place, output in enumerate(self.outputs))
        return replace(self, outputs=outputs, repeated=tuple(repeated))

    def pick(self, values: Sequence[int]) -> tuple[int, ...]:
        """Picks the values of the program's symbols out of a call's size values."""
        return tuple([values[place] for place in self.places])

    def vectors(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The vectors of scalars that the program takes after its tensors, for these values of its symbols."""
        return [
            torch.tensor(numbers, dtype=dtype)
            for numbers, (dtype, _) in zip(self.numbers(values), self.given, strict=True)
        ]

    def numbers(self, values: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of these vectors."""
        return [values if f is None else f(*values) for _, f in self.given]

    def crop(self, outputs: Sequence[Any], values: Sequence[int], lazily: ToCorner | None = None) -> list[Any]:
        """Crops all outputs.

        Args:
            lazily: makes a tensor of the leading window of a padded tensor without a copy, or returns None if it cannot; None:
                no such function.
        """
        cropped = [_finished(made, output, values, lazily) for made, output in zip(outputs, self.outputs, strict=True)]
        for place, earlier in self.repeated:
            cropped[place] = cropped[earlier]
        return cropped


def _computed(given: ScalarVector, symbols: Sequence[sympy.Symbol]) -> tuple[torch.dtype, Sizes | None]:
    return given.dtype, None if given.numbers == symbols else compile_sizes(given.numbers, symbols)


def _output(output: PaddedOutput | Size | None, graph: PaddedGraph) -> Crop | Sizes | None:
    if isinstance(output, PaddedOutput):
        factors, sizes, strides = (
            compile_sizes(s, graph.symbols) for s in (output.factors, output.sizes, output.strides)
        )
        return Crop(factors, sizes, strides, len(output.factors) == len(output.sizes), output.saved)
    return None if output is None else compile_sizes([output], graph.symbols)


def _finished(made: Any, output: Crop | Sizes | None, values: Sequence[int], lazily: ToCorner | None) -> object:
    if output is None:
        return made
    return output.apply(made, values, lazily) if isinstance(output, Crop) else output(*values)[0]
