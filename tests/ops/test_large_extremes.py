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


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("shape", [(128, 32), (4, 2000), (1024, 8), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_a_nan_is_the_extreme(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    x[::7, ::5] = torch.nan
    x[3] = torch.inf
    reduction = REDUCTIONS[name]
    compiled = torch.compile(reduction, backend="dynaxla")
    for mine, eager in zip(tree_leaves(compiled(x)), tree_leaves(reduction(x)), strict=True):
        assert_close(mine, eager)
