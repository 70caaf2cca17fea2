"""A user's file: factories that the tests of bench name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Embedded(nn.Module):
    """Tokens [batch, length] and a mask of them -> [batch, length, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(tokens) * mask[..., None]).relu()


def make_embedded() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 50, (2, 12))
    return Embedded().eval(), (tokens,), {"mask": (tokens > 5).float()}


def make_linear() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Linear(4, 3), (torch.randn(2, 4),)


class Normalized(nn.Module):
    """An attention whose key bias has a gradient of 0 in exact arithmetic, and a layer norm last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.bias = nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x @ (x + self.bias).T).softmax(-1) @ self.linear(x))  # type: ignore[no-any-return]


def make_normalized() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Normalized(), (torch.randn(6, 4),)


def make_function() -> Callable[[], torch.Tensor]:
    """A factory of a function without arguments: the factory gives it, a call computes."""
    x = torch.randn(8)
    return lambda: x.sin().sum()


def make_dropout() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Dropout(0.5), (torch.ones(100),)


def make_nothing() -> int:
    return 3


def make_error() -> Any:
    raise KeyError("the user's own")
