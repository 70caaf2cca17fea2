"""What torch._dynamo.reset() drops is gone: programs, their memory and the weights that they hold."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.runtime.loaded_executables import PjrtExecutable


def live() -> int:
    gc.collect()
    return sum(issubclass(type(each), PjrtExecutable) for each in gc.get_objects())


def test_programs_are_released_with_their_functions() -> None:
    torch._dynamo.reset()
    before = live()
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    compiled = torch.compile(net, backend="dynaxla")
    compiled(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        compiled(torch.randn(3, 4))
    torch.compile(lambda x: x.sin().sum(0), backend="dynaxla")(torch.randn(3, 4))
    assert live() >= before + 4
    del compiled
    torch._dynamo.reset()
    assert live() == before


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
def test_results_do_not_hold_the_programs_that_made_them(device: str) -> None:
    dynaxla.use("cpu")
    torch._dynamo.reset()
    before = live()
    compiled = torch.compile(lambda x: (x.cos() * 2).cumsum(0), backend="dynaxla")
    x = torch.randn(3, 7)
    result = compiled(x.to(device))
    assert live() > before
    del compiled
    torch._dynamo.reset()
    assert live() == before
    torch.testing.assert_close(result.cpu(), (x.cos() * 2).cumsum(0))
