"""Trains a net compiled and its twin in eager, and compares everything that a step leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Wrap = Callable[[Any], Any]
Step = Callable[[Tensor, Tensor], Any]
Run = Callable[[nn.Module, Wrap], Step]
"""Makes of a net its training step; what is to be compiled goes through the second argument."""

FORWARD_AND_BACKWARD = (2, 0, 0, 0)
"""What four steps of a compiled net compile."""

NOTHING = 1e-6  # what is zero but for rounding, as the gradient of a bias before a norm


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="dynaxla")


def in_eager(function: Any) -> Any:
    return function


def mlp() -> nn.Module:
    """[batch, 6] -> [batch, 3]."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def draw(seed: int, batch: int = 8) -> tuple[Tensor, Tensor]:
    """Rows and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator), torch.randint(0, 3, (batch,), generator=generator)


def plain(net: nn.Module, wrap: Wrap) -> Step:
    """The net compiled, loss and optimizer in eager."""
    forward = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), labels).backward()
        optimizer.step()

    return step


def check(
    run: Run, recorder: Recorder, compiles: Sequence[int], net: nn.Module | None = None, eager_ops: int = 0
) -> nn.Module:
    """Trains one step for each number in `compiles`: how many executables that step compiles.

    After each step parameters, buffers and gradients are eager's, and the buffers are the tensors that they were. Gives the
    net that was trained compiled.
    """
    net = net or mlp()
    twin = copy.deepcopy(net)
    step, eager_step = run(net, compiled), run(twin, in_eager)
    buffers = dict(net.named_buffers())
    for seed, amount in enumerate(compiles):
        x, labels = draw(seed)
        with recorder.expect(compiles=amount, eager_ops=eager_ops if seed == 0 else 0):
            mine = step(x, labels)
        wanted = eager_step(x, labels)
        if isinstance(wanted, Tensor):
            assert_close(mine, wanted)
        compare(net, twin)
        assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    return net


def compare(net: nn.Module, twin: nn.Module) -> None:
    for (name, mine), wanted in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        _assert_close(name, mine, wanted)
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), f"{name}: one has a gradient"
        if parameter.grad is not None and other.grad is not None:
            _assert_close(f"{name}.grad", parameter.grad, other.grad)


def _assert_close(name: str, mine: Tensor, wanted: Tensor) -> None:
    if wanted.is_floating_point() and max(mine.abs().max().item(), wanted.abs().max().item()) < NOTHING:
        return
    try:
        assert_close(mine, wanted)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error
