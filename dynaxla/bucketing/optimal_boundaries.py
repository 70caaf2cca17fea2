"""Boundaries of buckets that make the padded work least, by exact dynamic programming.

One dim: sizes are cut into runs, and each run is padded to its largest size. Two dims: the first dim is cut into runs,
called slabs, and every slab cuts the second dim into runs of its own; a cell is padded to its slab's largest first size
times its run's largest second size. Work is counted in elements, as float64: exact below 2^53.

The two-dim search needs the cost of a slab's best columns for every slab, which is too many of them to compute. It starts
from a coarse grid of slab boundaries and halves the grid's step until it is 1. A slab's columns can not cost less than
the best columns of pieces of it together, each piece with as many columns as the whole: so the coarser grid bounds every
slab of the finer one from below, and only slabs that could be part of a better plan than the best one known are computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_COARSEST = 16  # slab boundaries of the first grid, of which every slab is computed


def best_runs(sizes: Floats, counts: Floats, most: int) -> list[int]:
    """The bounds of at most `most` runs that make the sum of bound * count least, ascending.

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


def best_cells(firsts: Floats, seconds: Floats, counts: Floats, most: int) -> list[tuple[int, int]]:
    """The bounds of at most `most` cells that make the sum of first bound * second bound * count least.

    Takes memory in proportion to len(firsts)^2 * most.

    Args:
        firsts: sizes of the first dim, distinct, ascending, each with an observation.
        seconds: sizes of the second dim, distinct, ascending.
        counts: observations of each pair, of shape (firsts, seconds).
        most: at least 1.
    """
    problem = _Problem(firsts, seconds, np.vstack([np.zeros((1, len(seconds))), np.cumsum(counts, 0)]), most)
    step = 1
    while len(firsts) > _COARSEST * step:
        step *= 2
    grid = _first_grid(problem, step)
    _compute_promising(problem, grid)
    while step > 1:
        step //= 2
        grid = _finer_grid(problem, grid, step)
        _compute_promising(problem, grid)
    cells = []
    for start, end, columns in _best_slabs(grid.known_costs(problem)):
        runs = best_runs(seconds, problem.counts_below[end] - problem.counts_below[start], columns)
        cells += [(int(firsts[end - 1]), bound) for bound in runs]
    return cells


def _run_costs(sizes: Floats, counts: Floats) -> Floats:
    """Of shape (sizes, sizes): the work of one run from the first index to the second; infinite if it would be empty."""
    below = np.concatenate([[0.0], np.cumsum(counts)])
    costs: Floats = sizes[None, :] * (below[None, 1:] - below[:-1, None])
    costs[np.tril_indices(len(sizes), -1)] = np.inf
    return costs


def _run_layers(costs: Floats, most: int) -> list[Floats]:
    """Entry q, at index i: the least work of the sizes up to i in at most q + 1 runs."""
    layers = [costs[0].copy()]
    for runs in range(1, most):
        layer = layers[-1]
        if runs < len(costs):
            layer = layer.copy()
            layer[1:] = np.minimum(layer[1:], (layers[-1][:-1, None] + costs[1:, 1:]).min(0))
        layers.append(layer)
    return layers


@dataclass(frozen=True, slots=True)
class _Problem:
    """Attributes:
    counts_below: row i holds the observations of the first i first sizes, per second size.
    """

    firsts: Floats
    seconds: Floats
    counts_below: Floats
    most: int

    def column_costs(self, start: int, end: int) -> Floats:
        """Of a slab of the first sizes start..end - 1: the least sum of column bound * count in 1, 2, ... columns."""
        counts = self.counts_below[end] - self.counts_below[start]
        seen = np.flatnonzero(counts)
        layers = _run_layers(_run_costs(self.seconds[seen], counts[seen]), self.most)
        return np.array([layer[-1] for layer in layers])


@dataclass(frozen=True, slots=True)
class _Grid:
    """What is known about slabs whose boundaries lie on a grid; filled in place while searching.

    Attributes:
        edges: where slabs may begin and end, as indices into the first sizes, from 0 to their number.
        costs: [i, j, q] is the work of the slab from edge i to edge j in q + 1 columns, per unit of the first dim, or
            less; 0 where i == j.
        computed: where costs are the work itself, not a lower bound.
    """

    edges: npt.NDArray[np.int64]
    costs: Floats
    computed: Bools

    def compute(self, problem: _Problem, start: int, end: int) -> None:
        self.costs[start, end] = problem.column_costs(int(self.edges[start]), int(self.edges[end]))
        self.computed[start, end] = True

    def work(self, problem: _Problem) -> Floats:
        """Costs times the slab's largest first size."""
        largest = np.concatenate([[0.0], problem.firsts[self.edges[1:] - 1]])
        work: Floats = self.costs * largest[None, :, None]
        return work

    def known_costs(self, problem: _Problem) -> Floats:
        return np.where(self.computed[:, :, None], self.work(problem), np.inf)


def _empty_grid(problem: _Problem, step: int) -> _Grid:
    edges = np.array([*range(0, len(problem.firsts), step), len(problem.firsts)])
    shape = (len(edges), len(edges))
    return _Grid(edges, np.zeros((*shape, problem.most)), np.zeros(shape, bool))


def _first_grid(problem: _Problem, step: int) -> _Grid:
    grid = _empty_grid(problem, step)
    for start, end in itertools.combinations(range(len(grid.edges)), 2):
        grid.compute(problem, start, end)
    return grid


def _finer_grid(problem: _Problem, coarse: _Grid, step: int) -> _Grid:
    """A grid of half the step: a slab costs at least its part on the coarse grid and the single steps that stick out."""
    grid = _empty_grid(problem, step)
    up = np.searchsorted(coarse.edges, grid.edges, "left")
    down = np.searchsorted(coarse.edges, grid.edges, "right") - 1
    between = up != down
    single = np.array([problem.column_costs(*grid.edges[i : i + 2]) for i in range(len(grid.edges) - 1)])
    none = np.zeros((1, problem.most))
    sticks_out_left = np.where(between[:, None], np.concatenate([single, none]), 0.0)
    sticks_out_right = np.where(between[:, None], np.concatenate([none, single]), 0.0)
    grid.costs[:] = coarse.costs[up[:, None], down] + sticks_out_left[:, None] + sticks_out_right[None, :]
    grid.computed[:] = coarse.computed[up[:, None], down] & ~between[:, None] & ~between
    begins = np.arange(len(single))
    grid.costs[begins, begins + 1] = single
    grid.computed[begins, begins + 1] = True
    every = np.arange(len(grid.edges))
    grid.costs[every, every] = 0
    return grid


def _compute_promising(problem: _Problem, grid: _Grid) -> None:
    """Computes slabs until no other slab can be part of a better plan than the best of the computed ones."""
    while True:
        best = _least_work(grid.known_costs(problem))[-1, -1]
        bounds = _least_work_through(grid.work(problem))
        promising = np.argwhere((bounds < best) & ~grid.computed)
        if not len(promising):
            return
        order = np.argsort(bounds[tuple(promising.T)], kind="stable")
        # The first ones lower the best so far, which may rule out the others.
        for start, end in promising[order[: max(32, len(order) // 4)]]:
            grid.compute(problem, start, end)


def _least_work(work: Floats) -> Floats:
    """Entry [j, c]: the least work of the slabs up to edge j in at most c cells."""
    edges, _, most = work.shape
    least = np.full((edges, most + 1), np.inf)
    least[0] = 0
    for end in range(1, edges):
        for columns in range(1, most + 1):
            before = least[:end, : most + 1 - columns]
            least[end, columns:] = np.minimum(
                least[end, columns:], (before + work[:end, end, columns - 1, None]).min(0)
            )
    return least


def _least_work_through(work: Floats) -> Floats:
    """Entry [i, j]: the least work of any plan that has the slab from edge i to edge j; infinite unless i < j."""
    edges, _, most = work.shape
    before = _least_work(work)
    after = _least_work(work[::-1, ::-1].transpose(1, 0, 2))[::-1]
    through = np.full((edges, edges), np.inf)
    for start in range(edges - 1):
        for columns in range(1, most + 1):
            rest = (before[start, : most + 1 - columns] + after[start + 1 :, most - columns :: -1]).min(1)
            candidate = rest + work[start, start + 1 :, columns - 1]
            through[start, start + 1 :] = np.minimum(through[start, start + 1 :], candidate)
    return through


def _best_slabs(work: Floats) -> list[tuple[int, int, int]]:
    """The slabs of least work: first edge, last edge, columns."""
    least = _least_work(work)
    slabs = []
    end, cells = len(work) - 1, work.shape[2]
    while end:
        totals = least[:end, cells - 1 :: -1] + work[:end, end, :cells]
        start, columns = (int(index) for index in np.unravel_index(np.argmin(totals), totals.shape))
        slabs.append((start, end, columns + 1))
        end, cells = start, cells - columns - 1
    return slabs[::-1]
