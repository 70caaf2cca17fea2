"""Distances of all norms, and their gradients, of batches, of points that are equal, and of points without coordinates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.lists import quick

NORMS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
SHAPES = (((5, 3), (4, 3)), ((2, 5, 3), (2, 4, 3)), ((1, 5, 3), (3, 4, 3)), ((5, 0), (4, 0)), ((0, 3), (4, 3)))


def gradients(distances: Tensor, points: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(distances.sin().sum(), points)


@pytest.mark.parametrize("p", quick(NORMS, 1.0, 3.0))
def test_distances_between_two_sets(p: float) -> None:
    def distances(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist")

    ours = torch.compile(distances, backend="dynaxla", dynamic=False)
    for first, second in SHAPES:
        points = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (first, second))
        actual, expected = ours(*points), distances(*points)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(actual, points), gradients(expected, points))


@pytest.mark.parametrize("p", quick(NORMS, 0.0, 2.0))
def test_distances_within_a_set(p: float) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    x[3] = x[1]
    x.requires_grad_()
    actual, expected = torch.compile(torch.pdist, backend="dynaxla", dynamic=False)(x, p), torch.pdist(x, p)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, (x,)), gradients(expected, (x,)), equal_nan=True)
