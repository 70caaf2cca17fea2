"""Outputs that are views of other outputs or of inputs: torch computes them at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

Outputs = list[Any]
"""The outputs of a graph."""


@dataclass(frozen=True, slots=True)
class Aliases:
    """The outputs that are views, which torch computes.

    Attributes:
        places: positions of these outputs.
        bases: positions of the outputs that they are views of; some may follow the graph's own outputs.
        count: number of the graph's own outputs.
        views: graph that computes the views, in order, from the graph's arguments and the bases.
    """

    places: tuple[int, ...]
    bases: tuple[int, ...]
    count: int
    views: GraphModule

    def wrap(self, function: Callable[[Sequence[Any]], Outputs]) -> Callable[[Sequence[Any]], Outputs]:
        """Wraps a function that computes the other outputs: the result returns the views as well."""

        def run(args: Sequence[Any]) -> Outputs:
            outputs = function(args)
            views = self.views.forward(*args, *[outputs[place] for place in self.bases])
            for place, view in zip(self.places, views, strict=True):
                outputs[place] = view
            return outputs[: self.count]

        return run
