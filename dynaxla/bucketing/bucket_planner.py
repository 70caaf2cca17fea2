"""Buckets from observed sizes: the boundaries that make the padded work least for a number of executables."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynaxla.bucket_policy import Explicit, JointPolicy, require_above
from dynaxla.bucketing.optimal_boundaries import best_cells, best_runs
from dynaxla.bucketing.size_histogram import Histogram
from dynaxla.errors import BucketError, OptionError

__all__ = ["Histogram", "Plan", "plan_buckets"]


_Costed = tuple[float, tuple[tuple[int, ...], ...]]  # the padded work of some observations, and the cells


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
        if len(sizes) != len(self.cells[0]):
            raise OptionError(f"{len(sizes)} sizes for a plan of {len(self.cells[0])} dims", "give one size per dim")
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


def plan_buckets(
    sizes: Histogram | Iterable[int | tuple[int, ...]],
    max_executables: int,
    above: Literal["error", "exact"] = "exact",
) -> Plan:
    """The plan of at most `max_executables` cells that makes the padded work of the observations least.

    Work is counted in elements, the product of the padded sizes. One dim: no other buckets do less. Two dims: no other
    plan does less that cuts the first dim into slabs and each slab's second dim on its own; `Plan.bucket` may still use
    a smaller cell of a later slab. The order of the dims matters: where either may come first, plan both ways and compare
    `padded_ratio`.

    Observations of two dims with a size 1 get cells of their own, as Dynamo makes graphs of their own of them, where there
    are executables enough for each kind to have one; sizes 0, and a size 1 of one dim, are left out: these programs exist
    with and without a plan.

    Measured, on one core of a server CPU with 100,000 log-normal pairs and 24 executables: 100 x 100 distinct sizes
    take 0.7 to 0.9 s, 500 x 500 take 15 to 20 s and 200 MB. Uniform pairs, 500 x 500, take 58 s; one dim of 500 distinct
    sizes 0.02 s.

    Raises:
        OptionError: `max_executables` is no number >= 1, there are no observations with sizes >= 2, or they are not
            all of one dim or all of two.
    """
    if type(max_executables) is not int or max_executables < 1:
        raise OptionError(f"max_executables={max_executables!r}", "write a whole number >= 1")
    counts = _planned(_counted(sizes))
    dims = {len(observed) for observed in counts}
    if dims not in ({1}, {2}):
        explanation = f"observations of {sorted(dims)} dims can not be planned"
        raise OptionError(explanation, "observe one size each time, or two each time")
    cells = (_plan_one_dim if dims == {1} else _plan_two_dims)(counts, max_executables)
    return Plan(tuple(sorted(cells, key=_volume_then_bounds)), above)


def _counted(sizes: Histogram | Iterable[int | tuple[int, ...]]) -> Mapping[tuple[int, ...], int]:
    if isinstance(sizes, Histogram):
        return sizes.counts()
    return Counter((observed,) if isinstance(observed, int) else tuple(observed) for observed in sizes)


def _planned(counts: Mapping[tuple[int, ...], int]) -> Mapping[tuple[int, ...], int]:
    planned = {sizes: count for sizes, count in counts.items() if count and min(sizes) >= 1 and max(sizes) >= 2}
    if not planned:
        raise OptionError("there are no observations of sizes >= 2 to plan from", "observe sizes first")
    return planned


def _plan_one_dim(counts: Mapping[tuple[int, ...], int], most: int) -> Sequence[tuple[int, ...]]:
    sizes = sorted(counts)
    values = np.array([size for (size,) in sizes], np.float64)
    weights = np.array([counts[size] for size in sizes], np.float64)
    return [(bound,) for bound in best_runs(values, weights, min(most, len(sizes)))]


def _plan_two_dims(counts: Mapping[tuple[int, ...], int], most: int) -> Sequence[tuple[int, ...]]:
    """Shares the executables out between the pairs with and without a size 1, so that all together cost least."""
    inner = {sizes: count for sizes, count in counts.items() if min(sizes) >= 2}
    edges = [_edge_plans(counts, dim, most) for dim in (0, 1) if any(sizes[dim] == 1 for sizes in counts)]
    if not inner:
        return _cheapest(edges, most)[1]
    if most <= len(edges):
        return _plan_inner(inner, most)[1]
    best: tuple[float, Sequence[tuple[int, ...]]] = (math.inf, ())
    least = _cheapest(edges, most)[0]
    for share in range(len(edges), most if edges else 1):
        edge_work, edge_cells = _cheapest(edges, share)
        work, cells = _plan_inner(inner, most - share)
        if edge_work + work < best[0]:
            best = edge_work + work, (*edge_cells, *cells)
        if least + work >= best[0]:  # with fewer cells the inner pairs cost no less
            break
    return best[1]


def _edge_plans(counts: Mapping[tuple[int, ...], int], dim: int, most: int) -> list[_Costed]:
    """The best plans in 1, 2, ... cells of the pairs whose size of a dim is 1."""
    sizes: dict[tuple[int, ...], int] = {(pair[1 - dim],): count for pair, count in counts.items() if pair[dim] == 1}
    plans: list[_Costed] = []
    for cells in range(1, min(most, len(sizes)) + 1):
        bounds = [bound for (bound,) in _plan_one_dim(sizes, cells)]
        work = sum(min(b for b in bounds if b >= size) * count for (size,), count in sizes.items())
        plans.append((float(work), tuple((1, bound) if dim == 0 else (bound, 1) for bound in bounds)))
    return plans


def _cheapest(edges: Sequence[list[_Costed]], share: int) -> _Costed:
    """The plans, one of each edge, that cost least with at most `share` cells together; nothing if there is no edge."""
    choices = [plans for plans in itertools.product(*edges) if sum(len(cells) for _, cells in plans) <= share]
    plans = min(choices, key=lambda plans: sum(work for work, _ in plans), default=())
    return sum(work for work, _ in plans), tuple(cell for _, cells in plans for cell in cells)


def _plan_inner(counts: Mapping[tuple[int, ...], int], most: int) -> _Costed:
    firsts, first_index = np.unique([first for first, _ in counts], return_inverse=True)
    seconds, second_index = np.unique([second for _, second in counts], return_inverse=True)
    table = np.zeros((len(firsts), len(seconds)))
    table[first_index, second_index] = list(counts.values())
    cells = best_cells(firsts.astype(np.float64), seconds.astype(np.float64), table, min(most, len(counts)))
    plan = Plan(tuple(sorted(cells, key=_volume_then_bounds)))
    return float(sum(math.prod(plan.bucket(*sizes)) * count for sizes, count in counts.items())), plan.cells


def _volume_then_bounds(cell: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return math.prod(cell), cell


def _require_cells(cells: tuple[tuple[int, ...], ...]) -> None:
    hint = "plan_buckets makes plans"
    if not cells or len({len(cell) for cell in cells}) != 1 or len(cells[0]) not in (1, 2):
        raise OptionError(f"the cells {cells!r} are not of one dim or two", hint)
    if any(type(bound) is not int or bound < 1 or max(cell) < 2 for cell in cells for bound in cell):
        raise OptionError(f"the cells {cells!r} hold a bound that is not a whole number >= 1, or nothing to pad", hint)
    if list(cells) != sorted(set(cells), key=_volume_then_bounds):
        raise OptionError(f"the cells {cells!r} are not in the order of their volumes", hint)
