"""Which cells a plan gets that grows with the calls' sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from dynaxla.bucketing.planning import Plan

Cell = tuple[int, ...]

PRICE = 0.006
"""A cell more has to save this share of the true elements: it costs a compile."""

FEW = 64
"""Of so few calls a cell has to save twice its price: what they have in common may be chance."""

ANEW = 0.9
"""A plan without the cells there are has to leave at most this share of the elements: all of its programs are compiled."""

_BOUNDS = 64  # of one dim, at most, that cells are tried with: a table of 64 x 64 cells by 4096 sizes is 130 MB


def grown(counts: Mapping[Cell, float], have: Collection[Cell], most: int) -> Plan:
    """A plan that keeps the cells there are and adds, one by one, the cell that saves most, while that is worth its price.

    So a later plan compiles only what it adds. Cells that no observation runs in are left out. Where there is no room, as the
    cells there are were for other sizes, a plan begins anew if that saves enough.

    Args:
        counts: how many calls had which sizes >= 1, one or two of them, not all 1.
        have: cells whose programs are there.
        most: cells of the plan.
    """
    cells = _added(counts, list(have), most)
    plan = _used(cells, counts)
    if have and len(cells) >= most:
        anew = _used(_added(counts, [], most), counts)
        kept = work(counts, lambda sizes: plan.bucket(*sizes))
        if plan.executables > most or work(counts, lambda sizes: anew.bucket(*sizes)) < ANEW * kept:
            return anew
    return plan


def _added(counts: Mapping[Cell, float], cells: list[Cell], most: int) -> list[Cell]:
    """The cells, and those that are worth it."""
    sizes, calls = np.array(list(counts)), np.array(list(counts.values()), np.float64)
    tried = _tried(sizes)
    holds, elements = _holds(tried, sizes), tried.prod(1).astype(np.float64)
    now = np.full(len(sizes), math.inf)
    for cell in cells:
        now = np.where(_holds(np.array([cell]), sizes)[0], np.minimum(now, math.prod(cell)), now)
    now = np.where(np.isinf(now), 2.0 * sizes.max(0).prod(), now)
    price = PRICE * float(sizes.prod(1) @ calls) * (1 + FEW / calls.sum())
    while len(cells) < most:
        saved = np.where(holds, np.maximum(now - elements[:, None], 0), 0) @ calls
        best = int(saved.argmax())
        if saved[best] < price:
            break
        cells.append(tuple(tried[best].tolist()))
        now = np.where(holds[best], np.minimum(now, elements[best]), now)
    return cells


def work(counts: Mapping[Cell, float], bucket: Callable[[Cell], Cell]) -> float:
    """The padded elements of all calls together."""
    return sum(math.prod(bucket(sizes)) * count for sizes, count in counts.items())


def _tried(sizes: np.ndarray) -> np.ndarray:
    """Cells with bounds among the sizes, evenly chosen where these are many; the largest is one of them."""
    bounds = [np.unique(column) for column in sizes.T]
    bounds = [every[np.unique(np.linspace(0, len(every) - 1, _BOUNDS).round().astype(int))] for every in bounds]
    tried = np.stack([grid.ravel() for grid in np.meshgrid(*bounds, indexing="ij")], 1)
    return np.asarray(tried[tried.max(1) > 1])


def _holds(cells: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Of shape (cells, sizes). A size 1 is not padded."""
    fits = (sizes[None] <= cells[:, None]) & ((sizes[None] == 1) == (cells[:, None] == 1))
    return np.asarray(fits.all(2))


def _used(cells: Collection[Cell], counts: Mapping[Cell, float]) -> Plan:
    """The plan of the cells that an observation runs in."""
    every = Plan(tuple(sorted(set(cells), key=lambda cell: (math.prod(cell), cell))))
    used = {every.bucket(*sizes) for sizes in counts}
    return Plan(tuple(cell for cell in every.cells if cell in used) or every.cells)
