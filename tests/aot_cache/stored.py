"""What the tests of stored captures share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.pytree import tree_leaves
from tests.tolerances import assert_close


def compile_anew(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", dynamic=dynamic, options=options)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))


def assert_all_close(actual: Any, expected: Any) -> None:
    for mine, its in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert_close(mine, its)


def gradients(function: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    """Outputs, and gradients of the arguments that want one."""
    leaves = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    result = function(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    sum(output.square().sum() for output in outputs if output.requires_grad).backward()
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
