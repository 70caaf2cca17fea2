"""Inputs and constants of a graph that are objects, not tensors or numbers, and that no op reads: they go around its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OpaqueValues:
    """The objects among a graph's inputs that no op of it reads, and the outputs that are such inputs.

    Attributes:
        inputs: positions of these inputs among AOTAutograd's.
        outputs: for each such output, its position and that of the input.
        constants: for each output that is an object of the graph's own, its position and the object.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()
    constants: tuple[tuple[int, object], ...] = ()

    def wrap(self, function: Callable[[Sequence[Any]], list[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
        """Makes a function of all inputs from one of the others, which gives None for these outputs."""
        if not (self.inputs or self.constants):
            return function
        left_out = frozenset(self.inputs)

        def run(args: Sequence[Any]) -> list[Any]:
            results = function([value for i, value in enumerate(args) if i not in left_out])
            for place, origin in self.outputs:
                results[place] = args[origin]
            for place, value in self.constants:
                results[place] = value
            return results

        return run
