"""A bucket plan: the buckets of one or two sizes, chosen from observed sizes. Made by `bucketing.bucket_planner`."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from typing import Literal

from dynaxla.bucket_policy import Explicit, JointPolicy, require_above, require_sizes
from dynaxla.bucketing.size_histogram import Histogram
from dynaxla.errors import BucketError, OptionError


@dataclass(frozen=True, slots=True)
class Plan(JointPolicy):
    """Buckets of one dim, or of two dims together.

    Attributes:
        cells: what sizes are padded to, each a program; by volume (the product of its bounds), then by bounds. A bound of 1
            is for the size 1, which Dynamo compiles into a graph of its own.
        above: sizes that no cell covers are compiled exactly ("exact") or an error ("error").

    Raises:
        OptionError: the cells are not such tuples of whole numbers >= 1, or `above` is another word.
    """

    cells: tuple[tuple[int, ...], ...]
    above: Literal["error", "exact"] = "exact"

    def __post_init__(self) -> None:
        require_above(self.above)
        _require_cells(self.cells)

    @property
    def executables(self) -> int:
        """How many programs the plan needs, those for sizes 0 and 1 and for sizes above its cells not counted."""
        return len(self.cells)

    def bucket(self, *sizes: int) -> tuple[int, ...]:
        """The bounds of the smallest cell that covers the sizes; for a size 1 a cell with a bound of 1, if one covers them.

        Sizes 0 and 1 stay what they are, whatever the cell.

        Raises:
            BucketError: no cell covers the sizes, and `above` is "error".
            OptionError: the plan is for another number of dims.
        """
        require_sizes(sizes, len(self.cells[0]), "a plan")
        cell = self._cell(sizes)
        if cell is not None:
            return tuple([bound if size > 1 else size for size, bound in zip(sizes, cell)])
        if self.above == "exact" or all(size <= 1 for size in sizes):
            return sizes
        raise BucketError(
            f"sizes {sizes} are above every cell of the plan",
            'plan again with such sizes, or let them compile exactly with above="exact"',
        )

    def _cell(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The cell for these sizes; one that has bounds of 1 elsewhere serves where no other covers them."""
        ones = [size == 1 for size in sizes]
        second: tuple[list[bool], tuple[int, ...]] | None = None
        for cell in self.cells:
            if all(map(operator.le, sizes, cell)):
                apart = [one != (bound == 1) for one, bound in zip(ones, cell)]
                if True not in apart:
                    return cell
                if second is None or apart < second[0]:
                    second = apart, cell
        return None if second is None else second[1]

    def padded_ratio(self, histogram: Histogram) -> float:
        """Padded elements per true element, over all observations; 1.0 where no observation has an element.

        Raises:
            BucketError: as `bucket`.
            OptionError: as `bucket`.
        """
        counts = histogram.counts()
        true = sum(math.prod(sizes) * count for sizes, count in counts.items())
        padded = sum(math.prod(self.bucket(*sizes)) * count for sizes, count in counts.items())
        return padded / true if true else 1.0

    def policy(self) -> Explicit:
        """The plan of one dim as a policy.

        Raises:
            OptionError: the plan is for two dims.
        """
        if len(self.cells[0]) != 1:
            raise OptionError("a plan for two dims is not a policy of one", "ask Plan.bucket(first, second)")
        return Explicit(tuple(bound for (bound,) in self.cells), self.above)

    def to_json(self) -> str:
        return json.dumps({"cells": self.cells, "above": self.above})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
            OptionError: the text is something else.
        """
        try:
            document = json.loads(text)
            return cls(tuple(tuple(cell) for cell in document["cells"]), document["above"])
        except (ValueError, KeyError, TypeError) as error:
            explanation = error.explanation if isinstance(error, OptionError) else f"{type(error).__name__}: {error}"
            raise OptionError(f"this is not a plan of buckets: {explanation}", "write it with Plan.to_json") from error


def volume_then_bounds(cell: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The order of a plan's cells: by volume (the product of the bounds), then by bounds."""
    return math.prod(cell), cell


def _require_cells(cells: tuple[tuple[int, ...], ...]) -> None:
    hint = "plan_buckets makes plans"
    if not cells or len({len(cell) for cell in cells}) != 1 or len(cells[0]) not in (1, 2):
        raise OptionError(f"the cells {cells!r} are not of one dim or two", hint)
    if any(type(bound) is not int or bound < 1 or max(cell) < 2 for cell in cells for bound in cell):
        raise OptionError(f"the cells {cells!r} hold a bound that is not a whole number >= 1, or nothing to pad", hint)
    if list(cells) != sorted(set(cells), key=volume_then_bounds):
        raise OptionError(f"the cells {cells!r} are not in the order of their volumes", hint)
