"""Which cells a plan gets that grows with the calls' sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dynaxla.bucketing.bucket_planner import Plan

Cell = tuple[int, ...]

PRICE = 0.005
"""A cell has to save this share of the true elements: it costs a compile."""

FEW = 96
"""Of so many calls it has to save twice that, of half as many five times: what few calls have in common may be chance."""

_BOUNDS = 64  # of one dim, at most, that cells are tried with: a table of 64 x 64 cells by 4096 sizes is 130 MB


def price(elements: float, calls: float) -> float:
    """The padded elements that a cell has to save of those of so many calls, which have so many true ones."""
    return PRICE * elements * (1 + (FEW / calls) ** 2)


def grown(counts: Mapping[Cell, float], have: Collection[Cell], most: int, powers: Sequence[int]) -> Plan:
    """A plan that keeps the cells there are and adds, one by one, the cell that saves most, while that is worth its price.

    So a later plan compiles only what it adds. Where there is no room, a cell takes the place of the one that saves least, if
    it saves so much more. Cells that no observation runs in are left out.

    Args:
        counts: how many calls had which sizes >= 1, one or two of them, not all 1.
        have: cells whose programs are there.
        most: cells of the plan.
        powers: how often each size is a factor of the elements.
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
    """The padded elements of sizes in cells.

    Args:
        sizes: of shape (sizes, dims).
        calls: that had each of them.
        powers: of the dims.
    """

    def __init__(self, sizes: np.ndarray, calls: np.ndarray, powers: np.ndarray) -> None:
        self.true = (sizes**powers).prod(1).astype(np.float64)
        self.nowhere = np.full(len(sizes), 2.0 * float((sizes.max(0) ** powers).prod()))
        """What a size counts that no cell holds."""
        self._sizes = sizes
        self._calls = calls
        self._powers = powers

    def padded(self, cells: np.ndarray) -> np.ndarray:
        """Of shape (cells, sizes); infinite where a cell does not hold them. A size 1 is not padded."""
        fits = (self._sizes[None] <= cells[:, None]) & ((self._sizes[None] == 1) == (cells[:, None] == 1))
        elements = (cells**self._powers).prod(1).astype(np.float64)
        return np.where(fits.all(2), elements[:, None], math.inf)

    def losses(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """What is padded more without each one of some cells."""
        table = np.array([*rows, self.nowhere])
        first, second = np.sort(table, axis=0)[:2]
        return np.asarray(np.where(table[:-1] == first, second - first, 0) @ self._calls)


def _tried(sizes: np.ndarray) -> np.ndarray:
    """Cells with bounds among the sizes, evenly chosen where these are many; the largest is one of them."""
    bounds = [np.unique(column) for column in sizes.T]
    bounds = [every[np.unique(np.linspace(0, len(every) - 1, _BOUNDS).round().astype(int))] for every in bounds]
    tried = np.stack([grid.ravel() for grid in np.meshgrid(*bounds, indexing="ij")], 1)
    return np.asarray(tried[tried.max(1) > 1])


def _used(cells: Collection[Cell], counts: Mapping[Cell, float]) -> Plan:
    """The plan of the cells that an observation runs in."""
    every = Plan(tuple(sorted(set(cells), key=lambda cell: (math.prod(cell), cell))))
    used = {every.bucket(*sizes) for sizes in counts}
    return Plan(tuple(cell for cell in every.cells if cell in used) or every.cells)
