"""Outputs that are views of other outputs or of inputs: torch makes them at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

Outputs = list[Any]
"""What a graph returns."""


@dataclass(frozen=True, slots=True)
class Aliases:
    """The outputs that torch makes.

    Attributes:
        places: which outputs.
        bases: the outputs that they are views of; some may stand behind the graph's own.
        count: how many are the graph's own.
        views: from the graph's arguments and the bases to the views, in order.
    """

    places: tuple[int, ...]
    bases: tuple[int, ...]
    count: int
    views: GraphModule

    def around(self, function: Callable[[Sequence[Any]], Outputs]) -> Callable[[Sequence[Any]], Outputs]:
        """The function that makes the other outputs, made to give these too."""

        def run(args: Sequence[Any]) -> Outputs:
            outputs = function(args)
            views = self.views.forward(*args, *[outputs[place] for place in self.bases])
            for place, view in zip(self.places, views, strict=True):
                outputs[place] = view
            return outputs[: self.count]

        return run
