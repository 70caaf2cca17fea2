"""Chooses buckets from observed sizes, so that little is padded with few executables.

A cell is a bucket of one or two sizes: the bound of each. One size is planned exactly, by dynamic programming. Two sizes are
planned greedily, as the plans of traffic that changes are, which keep the cells whose programs are compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dynaxla.bucketing.bucket_plan import Plan, volume_then_bounds
from dynaxla.bucketing.size_histogram import Histogram
from dynaxla.errors import OptionError

__all__ = ["Histogram", "Plan", "extend_plan", "minimum_saving", "plan_buckets"]

Floats = npt.NDArray[np.float64]
Cell = tuple[int, ...]


def plan_buckets(
    sizes: Histogram | Iterable[int | tuple[int, ...]],
    max_executables: int,
    above: Literal["error", "exact"] = "exact",
) -> Plan:
    """Plans at most `max_executables` cells that keep the padded work of the observed sizes low.

    Work is counted in elements, the product of the padded sizes. One size: no other buckets have less work. Two
    sizes: cells are
    added one by one, each time the one that saves most. Against the best plan that cuts the first size into slabs and each slab
    by itself, greedy plans of 8 and 24 cells had 0.96 to 1.02 times the work (300 log-normal or uniform pairs).

    Observations of two sizes with a size 1 get cells of their own, as Dynamo makes graphs of their own of them; sizes 0, and a
    size 1 alone, are left out: their programs exist with and without a plan.

    Raises:
        OptionError: `max_executables` is no number >= 1, no observed size is >= 2, or the observations are not all of one
            size or all of two.
    """
    if type(max_executables) is not int or max_executables < 1:
        raise OptionError(f"max_executables={max_executables!r}", "write a whole number >= 1")
    counts = _select_plannable(_count_sizes(sizes))
    dims = {len(observed) for observed in counts}
    if dims not in ({1}, {2}):
        explanation = f"observations of {sorted(dims)} dims can not be planned"
        raise OptionError(explanation, "observe one size each time, or two each time")
    if dims == {2}:
        return Plan(_plan_two_sizes(counts, max_executables), above)
    return Plan(tuple(_plan_one_size(counts, max_executables)), above)


def _count_sizes(sizes: Histogram | Iterable[int | tuple[int, ...]]) -> Mapping[tuple[int, ...], int]:
    if isinstance(sizes, Histogram):
        return sizes.counts()
    return Counter((observed,) if isinstance(observed, int) else tuple(observed) for observed in sizes)


def _select_plannable(counts: Mapping[tuple[int, ...], int]) -> Mapping[tuple[int, ...], int]:
    planned = {sizes: count for sizes, count in counts.items() if count and min(sizes) >= 1 and max(sizes) >= 2}
    if not planned:
        raise OptionError("there are no observations of sizes >= 2 to plan from", "observe sizes first")
    return planned


# One size, exactly


def _plan_one_size(counts: Mapping[tuple[int, ...], int], most: int) -> Sequence[tuple[int, ...]]:
    sizes = sorted(counts)
    values = np.array([size for (size,) in sizes], np.float64)
    weights = np.array([counts[size] for size in sizes], np.float64)
    return [(bound,) for bound in _best_bounds(values, weights, min(most, len(sizes)))]


def _best_bounds(sizes: Floats, counts: Floats, most: int) -> list[int]:
    """At most `most` bounds, ascending, that minimize the sum of bound * count when each size is padded to the next
    bound. Work is
    float64: exact below 2 ** 53.

    Args:
        sizes: distinct, ascending.
        counts: observations of each size; a size that has none needs no run.
        most: at least 1.
    """
    seen = np.flatnonzero(counts)
    costs = _run_costs(sizes[seen], counts[seen])
    layers = _run_layers(costs, most)
    bounds = []
    last, left = len(seen) - 1, most - 1
    while last >= 0:
        bounds.append(int(sizes[seen[last]]))
        before = np.concatenate([[0.0], layers[left - 1][:last]]) if left else np.zeros(1)
        first = int(np.argmin(before + costs[: len(before), last]))
        last, left = first - 1, left - 1
    return bounds[::-1]


def _run_costs(sizes: Floats, counts: Floats) -> Floats:
    """Work of padding the sizes from index i to j to size j, shape (sizes, sizes); infinite where i > j."""
    below = np.concatenate([[0.0], np.cumsum(counts)])
    costs: Floats = sizes[None, :] * (below[None, 1:] - below[:-1, None])
    costs[np.tril_indices(len(sizes), -1)] = np.inf
    return costs


def _run_layers(costs: Floats, most: int) -> list[Floats]:
    """Entry q at index i: the least work of the sizes up to index i with at most q + 1 bounds."""
    layers = [costs[0].copy()]
    for runs in range(1, most):
        layer = layers[-1]
        if runs < len(costs):
            layer = layer.copy()
            layer[1:] = np.minimum(layer[1:], (layers[-1][:-1, None] + costs[1:, 1:]).min(0))
        layers.append(layer)
    return layers


# Two sizes, greedily; and plans that keep the cells there are


def _plan_two_sizes(counts: Mapping[Cell, int], most: int) -> tuple[Cell, ...]:
    """Cells that cover all observed pairs; pairs with a size 1 have cells of their own if `most` is large enough for that."""
    inner = {sizes: count for sizes, count in counts.items() if min(sizes) >= 2}
    kinds_with_1 = sum(any(sizes[dim] == 1 for sizes in counts) for dim in (0, 1))
    planned = inner if inner and most <= kinds_with_1 else counts
    return extend_plan(planned, (), most, (1, 1), price=0.0, uncovered=_NEVER).cells


_NEVER = 1e6  # times the largest size: a size that fits in no cell outweighs any padding

SAVED_SHARE = 0.005
"""Share of the true elements that a new cell has to save in padding to be worth one compile."""

FEW = 96
"""Number of observed calls at which a new cell has to save twice `SAVED_SHARE`; at half as many calls, five times. A
size that few calls share may be chance."""

_BOUNDS = 64  # candidate bounds of one dim, at most: a table of 64 x 64 cells by 4096 sizes takes 130 MB


def minimum_saving(elements: float, calls: float) -> float:
    """Minimum padding, in elements, that a new cell must save over `calls` calls of `elements` true elements to be worth one
    compile."""
    return SAVED_SHARE * elements * (1 + (FEW / calls) ** 2)


def extend_plan(
    counts: Mapping[Cell, float],
    have: Collection[Cell],
    most: int,
    powers: Sequence[int],
    price: float | None = None,
    uncovered: float = 2.0,
) -> Plan:
    """Extends a plan greedily: keeps the existing cells and adds the cell that saves most padding while it is worth a compile.

    A later plan therefore compiles only the cells that it adds. A full plan replaces the cell that saves least, if the new one
    saves more by the price of a compile. Cells in which no observed size runs are dropped.

    Args:
        counts: number of calls per combination of sizes; one or two sizes >= 1 each, not all of them 1.
        have: cells whose programs are compiled.
        most: maximum number of cells of the plan.
        powers: per size, the power with which it enters the number of elements.
        price: minimum padding, in elements, that a new cell must save; by default that of `minimum_saving`.
        uncovered: elements charged for a size that fits in no cell, as a multiple of the largest size's.
    """
    sizes, calls = np.array(list(counts)), np.array(list(counts.values()), np.float64)
    work = _PaddedWork(sizes, calls, np.array(powers), uncovered)
    candidates = _candidates(sizes)
    padded = work.pad_cells(candidates)
    least = minimum_saving(float(work.true @ calls), float(calls.sum())) if price is None else price
    cells = list(have)
    rows = list(work.pad_cells(np.array(cells))) if cells else []
    while True:
        now = np.min([work.uncovered, *rows], axis=0)
        saved = np.maximum(now - padded, 0) @ calls
        best = int(saved.argmax())
        if len(cells) >= most:
            losses = work.losses(rows)
            worst = int(losses.argmin())
            if len(cells) == most and saved[best] - losses[worst] <= least:
                break
            del cells[worst], rows[worst]
        elif saved[best] <= least:
            break
        else:
            cells.append(tuple(candidates[best].tolist()))
            rows.append(padded[best])
    return _drop_unused(cells, counts)


class _PaddedWork:
    """Padded elements of observed sizes when they run in given cells.

    Args:
        sizes: observed sizes, shape (sizes, dims).
        calls: number of calls per row of `sizes`.
        powers: per dim, the power with which it enters the number of elements.
        uncovered: see `extend_plan`.
    """

    def __init__(self, sizes: np.ndarray, calls: np.ndarray, powers: np.ndarray, uncovered: float) -> None:
        self.true = (sizes**powers).prod(1).astype(np.float64)
        self.uncovered = np.full(len(sizes), uncovered * float((sizes.max(0) ** powers).prod()))
        """Elements charged for a size that fits in no cell."""
        self._sizes = sizes
        self._calls = calls
        self._powers = powers

    def pad_cells(self, cells: np.ndarray) -> np.ndarray:
        """Padded elements of every size in every cell, shape (cells, sizes); infinite where the size does not fit in the cell.
        A size 1 is never padded."""
        fits = (self._sizes[None] <= cells[:, None]) & ((self._sizes[None] == 1) == (cells[:, None] == 1))
        elements = (cells**self._powers).prod(1).astype(np.float64)
        return np.where(fits.all(2), elements[:, None], math.inf)

    def losses(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Extra padded elements, over all calls, if each one of the cells were removed. `rows`: `padded` of the cells."""
        table = np.array([*rows, self.uncovered])
        first, second = np.sort(table, axis=0)[:2]
        return np.asarray(np.where(table[:-1] == first, second - first, 0) @ self._calls)


def _candidates(sizes: np.ndarray) -> np.ndarray:
    """Candidate cells whose bounds are observed sizes, evenly spaced samples of them where there are many; the largest size is
    always a candidate."""
    bounds = [np.unique(column) for column in sizes.T]
    bounds = [every[np.unique(np.linspace(0, len(every) - 1, _BOUNDS).round().astype(int))] for every in bounds]
    candidates = np.stack([grid.ravel() for grid in np.meshgrid(*bounds, indexing="ij")], 1)
    return np.asarray(candidates[candidates.max(1) > 1])


def _drop_unused(cells: Collection[Cell], counts: Mapping[Cell, float]) -> Plan:
    """Returns the plan of the cells in which at least one observed size runs."""
    every = Plan(tuple(sorted(set(cells), key=volume_then_bounds)))
    used = {every.bucket(*sizes) for sizes in counts}
    return Plan(tuple(cell for cell in every.cells if cell in used) or every.cells)
