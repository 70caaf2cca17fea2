"""Inputs that are written where autograd does not look have no gradient, as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from tests.torch_api.boundary import boundary


def write_all(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(2)
    return x * 2


def write_data(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w.data.lerp_(x.mean(0), 0.5)
    return x * 2


def write_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w[1:].copy_(x.sum(0)[1:])
    return x * 2


def write_and_read(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(2)
    return x * w


def read_and_write(x: Tensor, w: Tensor) -> Tensor:
    y = x + w
    with torch.no_grad():
        w.mul_(2)
    return y.sin()


@boundary("aot.drop_hidden_gradients")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [write_all, write_data, write_part, write_and_read, read_and_write])
def test_gradients_are_there_where_eagers_are(function: Callable[[Tensor, Tensor], Tensor], dynamic: bool) -> None:
    given = torch.randn(3, 4)
    found = []
    for run in (function, torch.compile(function, backend="dynaxla", dynamic=dynamic)):
        x, w = given.clone().requires_grad_(), torch.ones(4, requires_grad=True)
        run(x, w).sum().backward()
        found.append((x.grad, w.grad, w.detach()))
    assert (found[0][1] is None) == (found[1][1] is None)
    for expected, made in zip(*found, strict=True):
        if expected is not None:
            assert_close(made, expected)
