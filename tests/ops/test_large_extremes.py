"""Maxima and minima of many elements: a NaN among them is the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.tolerances import assert_close

Reduction = Callable[[torch.Tensor], Any]
REDUCTIONS: dict[str, Reduction] = {
    "amax": lambda x: x.amax(0),
    "amin of rows": lambda x: (x * 2).amin(1),
    "max of all": lambda x: x.max(),
    "of both dims": lambda x: torch.stack([x.amin((0, 1)), x.amax((0, 1))]),
    "both": lambda x: torch.aminmax(x, dim=0),
    "norms": lambda x: [torch.linalg.vector_norm(x, order, 0) for order in (float("inf"), -float("inf"))],
    "max by dim": lambda x: x.max(0)[0],
}


BEFORE_A_REDUCTION: dict[str, Reduction] = {
    "relu and a sum": lambda x: torch.relu(x).sum(-1),
    "a bound and a mean": lambda x: x.clamp_min(0.5).mean((0, 1)),
    "the smaller and a sum": lambda x: torch.minimum(x, x * 2).sum(0),
    "relu and the squares": lambda x: torch.relu(x).square().sum(-1),
    "adaptive pool": lambda x: torch.nn.functional.adaptive_max_pool2d(x[None], (8, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_a_nan_reaches_the_reduction_behind_an_extreme(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    x[::7, ::5] = torch.nan
    for name, function in BEFORE_A_REDUCTION.items():
        actual, expected = torch.compile(function, backend="dynaxla")(x), function(x)
        assert torch.equal(actual.isnan(), expected.isnan()), name
        assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(128, 32), (4, 2000), (1024, 8), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_a_nan_is_the_extreme(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All reductions are one graph, each of a tensor of its own."""
    operands = {name: torch.randn(shape).to(dtype) for name in REDUCTIONS}
    for x in operands.values():
        x[::7, ::5] = torch.nan
        x[3] = torch.inf

    def reduce(operands: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: reduction(operands[name]) for name, reduction in REDUCTIONS.items()}

    actual, expected = torch.compile(reduce, backend="dynaxla")(operands), reduce(operands)
    for name in REDUCTIONS:
        for mine, eager in zip(tree_leaves(actual[name]), tree_leaves(expected[name]), strict=True):
            try:
                assert_close(mine, eager)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
