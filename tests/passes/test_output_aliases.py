"""Outputs that are views of inputs or of each other, of sizes that vary: eager's values, strides, offsets and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.lists import quick
from tests.tolerances import assert_close

Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _exp_and_pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.exp()
    return y, y[:, :1].expand_as(y), y[:, 1:].t(), *y.chunk(2, 1)


def _double_and_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y.t(), y.view(-1), y.view(-1)[x.shape[0] :]


def _norm_and_pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.nn.functional.layer_norm(x, (8,))
    return y, *y.chunk(2, 1)


FUNCTIONS: dict[str, Function] = {
    "slices": lambda x: (x[:, 1:5], x[1:].t(), x[2:-1], x[-1], x[:, ::2]),
    "pieces": lambda x: tuple(x.chunk(2, 1)),
    "expanded": lambda x: (x.unsqueeze(1).expand(-1, 4, -1), x[:, :1].expand_as(x)),
    "flattened": lambda x: (x.view(-1)[x.shape[0] :], x.view(x.shape[0], 2, -1)),
    "sizes of a view": lambda x: ((lambda v: v.reshape(v.shape[0], -1))(x.view(x.shape[0], 2, -1)[..., 1::2]),),
    "sizes of a view of a result": lambda x: (
        lambda y: (y, (lambda v: v.reshape(v.shape[0], -1))(y.view(y.shape[0], 2, -1)[..., 1::2]))
    )(x * 2),
    "beside": lambda x: (x.t(), x.exp()),
    "of a result": _exp_and_pieces,
    "of a result alone": _double_and_views,
    "of one of several results": _norm_and_pieces,
}


@pytest.mark.parametrize("bucketing", quick(["auto", "off"], "auto"))
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_of_sizes_that_vary(name: str, gradients: bool, bucketing: str) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="dynaxla", options={"bucketing": bucketing}, dynamic=True)
    for size in (5, 9, 17, 18):
        x = torch.randn(size, 8, requires_grad=gradients)
        with torch.set_grad_enabled(gradients):
            actual, expected = compiled(x), function(x)
        for mine, eager in zip(actual, expected, strict=True):
            assert_close(mine.detach(), eager.detach())
            assert _shares(mine, x) == _shares(eager, x)
            if _shares(eager, x):
                assert mine.stride() == eager.stride()
                assert mine.storage_offset() == eager.storage_offset()
        if gradients:
            _compare_gradients(actual, expected, x)


def _compare_gradients(actual: Any, expected: Any, x: torch.Tensor) -> None:
    mine, eager = (torch.autograd.grad(sum((y * y * y).sum() for y in outputs), x)[0] for outputs in (actual, expected))
    assert_close(mine, eager)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unflatten(-1, (-1, 2)),
        lambda x: x[-((x.shape[0] + 1) // 2) :],
        lambda x: (x.sin(), x.reshape(-1, x.shape[-1])),
    ],
)
@pytest.mark.parametrize("leaf", quick([True, False], True))
def test_gradients_of_a_view_of_an_expanded_input(function: Any, dynamic: bool | None, leaf: bool) -> None:
    """AOTAutograd's own are the mean over elements that lie in one place, where sizes vary."""
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for size in (5, 8, 11):
        row = torch.randn(size, 1, 4, requires_grad=not leaf)
        gradients = []
        for run in (compiled, function):
            x = row.expand(size, 3, 4).detach().requires_grad_() if leaf else row.expand(size, 3, 4)
            results = tree_leaves(run(x))
            weights = [torch.arange(float(result.numel())).reshape(result.shape) for result in results]
            gradients += torch.autograd.grad(results, [x] if leaf else [x, row], weights)
        for mine, eager in zip(gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :], strict=True):
            assert_close(mine, eager)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [lambda x: x[1:], lambda x: (x.sin(), x.t())])
def test_gradients_of_a_view_of_windows(function: Any, dynamic: bool | None) -> None:
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for size in (6, 9, 12):
        memory = torch.randn(size, requires_grad=True)
        gradients = []
        for run in (compiled, function):
            x = memory.unfold(0, 3, 1)
            results = tree_leaves(run(x))
            weights = [torch.arange(float(result.numel())).reshape(result.shape) for result in results]
            gradients.append(torch.autograd.grad(results, [x, memory], weights))
        for mine, eager in zip(*gradients, strict=True):
            assert_close(mine, eager)


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product of batches": lambda x: x[None] @ torch.ones(8, 8),
    "a linear layer": lambda x: torch.nn.functional.linear(x[None], torch.ones(8, 8)),
    "a contraction": lambda x: torch.einsum("bij,jk->bik", x[None], torch.ones(8, 8)),
    "the only piece": lambda x: torch.unsafe_split((x * 2)[None], 1)[0],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "write", [lambda y: y.mul_(2), lambda y: y[0].add_(1), lambda y: y[:, :1].fill_(3), lambda y: y]
)
@pytest.mark.parametrize("name", MADE)
def test_views_of_a_value_that_is_written(name: str, write: Function, dynamic: bool) -> None:
    """Torch takes these for tensors of their own, not for views."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = MADE[name](x)
        write(y)
        return y, y.select(1, 0), y.transpose(1, 2), y

    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for size in (2, 5):
        x = torch.randn(size, 8)
        actual, expected = compiled(x), function(x)
        for written, same in zip(actual, expected, strict=True):
            for mine, eager in zip(actual, expected, strict=True):
                assert_close(mine, eager)
            written.mul_(3)
            same.mul_(3)


SAVED: dict[str, Function] = {
    "exp": lambda x: x.exp().t(),
    "relu": lambda x: x.relu().view(-1),
    "softmax": lambda x: x.softmax(-1)[1:],
    "sqrt": lambda x: x.t().sqrt()[None].transpose(1, 2),
    "itself": lambda x: x.exp(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", quick(SAVED, "exp"))
def test_a_write_to_a_view_of_what_the_backward_reads(name: str, breaks: bool, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = SAVED[name](x)
        if breaks:
            torch._dynamo.graph_break()
            y.mul_(2)
        return y

    def find_gradient(function: Function) -> torch.Tensor:
        x = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
        y = function(x)
        if not breaks:
            y.detach().mul_(2)
        return torch.autograd.grad(y.sum(), x)[0]

    for each in (function, torch.compile(function, backend="dynaxla", dynamic=dynamic)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            find_gradient(each)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channels_that_are_not_shuffled_are_copied(groups: int) -> None:
    """Torch's decomposition gives the input itself for one group, and for groups of one channel."""
    x = torch.randn(2, 4, 3, 3)
    given = x.clone()
    shuffled = torch.compile(torch.nn.ChannelShuffle(groups), backend="dynaxla")(x)
    assert torch.equal(shuffled, torch.channel_shuffle(x, groups))
    shuffled.zero_()
    assert torch.equal(x, given)
