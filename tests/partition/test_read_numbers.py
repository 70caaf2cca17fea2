"""Numbers that are read out of tensors in the middle of a graph: each call has its own, and none is compiled into a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Function = Callable[[torch.Tensor], Any]

READ: dict[str, Function] = {
    "returned": lambda x: (x + 1, x.sum().item()),
    "computed with": lambda x: x.sum().item() * 2 + 1,
    "a truth value": lambda x: ((x > 4).any().item(), x * 2),
    "a whole number": lambda x: x * int(x.nan_to_num().abs().sum().item()),
    "clamp": lambda x: x.clamp(x.min().item() * 0.5, x.mean().item()),
    "max": lambda x: x.clamp(max=max(x.mean().item(), 0.5)),
    "full": lambda x: torch.full((3,), x.mean().item()),
    "full_like": lambda x: torch.full_like(x, x.mean().item()),
    "fill_": lambda x: (x * 2).fill_(x.mean().item()),
    "tensor": lambda x: torch.tensor([x.mean().item(), 2.0, x.max().item()]),
    "where": lambda x: torch.where(x > 0, x.mean().item(), 0.0),
    "where, of a truth value": lambda x: torch.where(x > 0, (x > 4).any().item(), False),
    "linspace": lambda x: torch.linspace(0, x.abs().mean().item(), 5),
    "masked_fill": lambda x: x.masked_fill(x > 1, x.mean().item()),
    "threshold": lambda x: F.threshold(x, x.mean().item(), x.min().item()),
    "leaky_relu": lambda x: F.leaky_relu(x, x.abs().mean().item()),
    "product": lambda x: x * x.mean().item(),
    "quotient": lambda x: x.abs().mean().item() / (x.abs() + 1),
    "comparison": lambda x: x >= x.mean().item(),
    "cond": lambda x: torch.cond(x.sum() > 5, lambda a: a * 2, lambda a: a - 1, (x,)) * x.mean().item(),
}
OF_SIZES: dict[str, Function] = {
    "clamp": lambda x: x.clamp(max=x.shape[0] / 3),
    "product": lambda x: x.sum() * (x.shape[0] / 3),
    "full": lambda x: x.sum() * torch.full((2,), x.shape[0] / 7),
    "a count": lambda x: x.clamp(max=(x > 0).sum().item() / 2),
}
INPUTS = [
    torch.tensor(values)
    for values in (
        [1.0, 2.0, -0.5],
        [5.0, 2.0, 1.0],
        [5.25, 2.0, 1.0],
        [9.0, -2.0, 7.0, 3.0, 1.0],
        [2.0, 3.0, 1.0, 0.1, 2.0],
        [0.0, -0.0, 0.0],
        [torch.nan, 1.0, 2.0],
    )
]


def _compare(function: Function, compiled: Function, x: torch.Tensor, train: bool) -> None:
    mine, theirs = x.clone().requires_grad_(train), x.clone().requires_grad_(train)
    got, expected = (
        [torch.as_tensor(leaf) for leaf in tree_leaves(made)] for made in (compiled(mine), function(theirs))
    )
    for one, other in zip(got, expected, strict=True):
        assert_close(one.detach(), other.detach())
    for made in (got, expected):
        if any(leaf.requires_grad for leaf in made):
            sum(leaf.sum() for leaf in made if leaf.requires_grad).backward()  # type: ignore[union-attr]
    assert (mine.grad is None) == (theirs.grad is None)
    if mine.grad is not None:
        assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_number_that_is_read_is_each_calls_own(name: str, train: bool, dynamic: bool | None) -> None:
    compiled = torch.compile(READ[name], backend="dynaxla", fullgraph=True, dynamic=dynamic)
    for x in INPUTS:
        _compare(READ[name], compiled, x, train)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", OF_SIZES)
def test_a_fraction_of_sizes_is_each_calls_own(name: str, train: bool) -> None:
    compiled = torch.compile(OF_SIZES[name], backend="dynaxla", fullgraph=True, dynamic=True)
    for x in INPUTS:
        _compare(OF_SIZES[name], compiled, x, train)


@pytest.mark.parametrize("name", ["clamp", "full_like", "threshold", "max"])
@torch.no_grad()
def test_no_program_is_compiled_for_a_number(name: str, recorder: Recorder) -> None:
    compiled = torch.compile(READ[name], backend="dynaxla", fullgraph=True, dynamic=True)
    compiled(INPUTS[0])
    with recorder.expect(compiles=0):
        for x in (INPUTS[1], INPUTS[2], INPUTS[6], -INPUTS[0]):
            _compare(READ[name], compiled, x, False)
    assert any("it takes a number that was read" in line for line in recorder.snapshot().fallbacks)
