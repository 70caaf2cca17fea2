"""A function's results and gradients, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tolerances import assert_close


def results(function: Callable[..., Any], args: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """A function's results, and for each argument the gradient of their sum with drawn weights, or None."""
    made = list(function(*args))
    smooth = [x for x in made if x.requires_grad]
    if not smooth:
        return made, [None for _ in args]
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=random) for x in smooth]
    grads = iter(torch.autograd.grad(smooth, [a for a in args if a.requires_grad], weights, allow_unused=True))
    return [x.detach() for x in made], [next(grads) if a.requires_grad else None for a in args]


def difference(actual: Tensor | None, expected: Tensor | None) -> str:
    """How they differ, or nothing; no gradient is one of zeros."""
    if actual is None or expected is None:
        found = actual if expected is None else expected
        return "" if found is None or not found.any() else f"{actual}, expected {expected}"
    try:
        assert_close(actual.detach(), expected.detach())
    except AssertionError as error:
        return str(error)
    return ""
