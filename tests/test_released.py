"""What torch._dynamo.reset() drops is gone: programs, their memory and the weights that they hold."""

from __future__ import annotations

import gc

import torch
from torch import nn

from dynaxla.runtime import xla
from dynaxla.runtime.executables import PjrtExecutable


def live() -> int:
    gc.collect()
    return sum(type(each) is PjrtExecutable for each in gc.get_objects())


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


def test_jaxs_own_tracebacks_are_back_after_it() -> None:
    jaxlib = xla.load()
    assert jaxlib.jax.tracebacks_enabled()
    with jaxlib.untraced, jaxlib.untraced:
        assert not jaxlib.jax.tracebacks_enabled()
    assert jaxlib.jax.tracebacks_enabled()
