"""Bucket plans that are extended as a part's traffic changes: buckets are added greedily, and existing ones are reused.

A cell is a bucket of one or two sizes: the bound of each. Its price is the one compile that it costs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dynaxla.bucketing.bucket_planner import Plan

Cell = tuple[int, ...]

PRICE = 0.005
"""Share of the true elements that a new cell has to save in padding to be worth one compile."""

FEW = 96
"""Number of observed calls at which a new cell has to save twice `PRICE`; at half as many calls, five times. A size that few
calls share may be chance."""

_BOUNDS = 64  # candidate bounds of one dim, at most: a table of 64 x 64 cells by 4096 sizes takes 130 MB


def price(elements: float, calls: float) -> float:
    """Minimum padding, in elements, that a new cell must save over `calls` calls of `elements` true elements to be worth one
    compile."""
    return PRICE * elements * (1 + (FEW / calls) ** 2)


def grown(counts: Mapping[Cell, float], have: Collection[Cell], most: int, powers: Sequence[int]) -> Plan:
    """Extends a plan greedily: keeps the existing cells and adds the cell that saves most padding while it is worth a compile.

    A later plan therefore compiles only the cells that it adds. A full plan replaces the cell that saves least, if the new one
    saves more by the price of a compile. Cells in which no observed size runs are dropped.

    Args:
        counts: number of calls per combination of sizes; one or two sizes >= 1 each, not all of them 1.
        have: cells whose programs are compiled.
        most: maximum number of cells of the plan.
        powers: per size, the power with which it enters the number of elements.
    """
    sizes, calls = np.array(list(counts)), np.array(list(counts.values()), np.float64)
    work = _Work(sizes, calls, np.array(powers))
    tried = _tried(sizes)
    padded = work.padded(tried)
    least = price(float(work.true @ calls), float(calls.sum()))
    cells = list(have)
    rows = list(work.padded(np.array(cells))) if cells else []
    while True:
        now = np.min([work.nowhere, *rows], axis=0)
        saved = np.maximum(now - padded, 0) @ calls
        best = int(saved.argmax())
        if len(cells) >= most:
            losses = work.losses(rows)
            worst = int(losses.argmin())
            if len(cells) == most and saved[best] - losses[worst] < least:
                break
            del cells[worst], rows[worst]
        elif saved[best] < least:
            break
        else:
            cells.append(tuple(tried[best].tolist()))
            rows.append(padded[best])
    return _used(cells, counts)


class _Work:
    """Padded elements of observed sizes when they run in given cells.

    Args:
        sizes: observed sizes, shape (sizes, dims).
        calls: number of calls per row of `sizes`.
        powers: per dim, the power with which it enters the number of elements.
    """

    def __init__(self, sizes: np.ndarray, calls: np.ndarray, powers: np.ndarray) -> None:
        self.true = (sizes**powers).prod(1).astype(np.float64)
        self.nowhere = np.full(len(sizes), 2.0 * float((sizes.max(0) ** powers).prod()))
        """Elements charged for a size that fits in no cell."""
        self._sizes = sizes
        self._calls = calls
        self._powers = powers

    def padded(self, cells: np.ndarray) -> np.ndarray:
        """Padded elements of every size in every cell, shape (cells, sizes); infinite where the size does not fit in the cell.
        A size 1 is never padded."""
        fits = (self._sizes[None] <= cells[:, None]) & ((self._sizes[None] == 1) == (cells[:, None] == 1))
        elements = (cells**self._powers).prod(1).astype(np.float64)
        return np.where(fits.all(2), elements[:, None], math.inf)

    def losses(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Extra padded elements, over all calls, if each one of the cells were removed. `rows`: `padded` of the cells."""
        table = np.array([*rows, self.nowhere])
        first, second = np.sort(table, axis=0)[:2]
        return np.asarray(np.where(table[:-1] == first, second - first, 0) @ self._calls)


def _tried(sizes: np.ndarray) -> np.ndarray:
    """Candidate cells whose bounds are observed sizes, evenly spaced samples of them where there are many; the largest size is
    always a candidate."""
    bounds = [np.unique(column) for column in sizes.T]
    bounds = [every[np.unique(np.linspace(0, len(every) - 1, _BOUNDS).round().astype(int))] for every in bounds]
    tried = np.stack([grid.ravel() for grid in np.meshgrid(*bounds, indexing="ij")], 1)
    return np.asarray(tried[tried.max(1) > 1])


def _used(cells: Collection[Cell], counts: Mapping[Cell, float]) -> Plan:
    """Returns the plan of the cells in which at least one observed size runs."""
    every = Plan(tuple(sorted(set(cells), key=lambda cell: (math.prod(cell), cell))))
    used = {every.bucket(*sizes) for sizes in counts}
    return Plan(tuple(cell for cell in every.cells if cell in used) or every.cells)
