"""`torch.compile(optimizer.step)`: eager's parameters and states, no eager part; a learning rate in a tensor may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
    "sgd with momentum": lambda p: torch.optim.SGD(
        p, torch.tensor(0.1), momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "adamw": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, torch.tensor(0.01), foreach=True),
}


def train(make: Make, wrap: Callable[[Any], Any]) -> tuple[list[Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = make(net.parameters())
    by_tensor = isinstance(optimizer.param_groups[0]["lr"], Tensor)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7 if by_tensor else 1.0)
    step = wrap(optimizer.step)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(8, 6)), torch.randint(0, 3, (8,))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step()
        schedule.step()
    return [p.detach() for p in net.parameters()], optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, recorder: Recorder) -> None:
    before = recorder.snapshot()
    mine, optimizer = train(OPTIMIZERS[name], lambda step: torch.compile(step, backend="dynaxla"))
    after = recorder.snapshot()
    eager, expected = train(OPTIMIZERS[name], lambda step: step)
    for parameter, wanted in zip(mine, eager, strict=True):
        assert_close(parameter, wanted)
    for state, wanted in zip(
        optimizer.state_dict()["state"].values(), expected.state_dict()["state"].values(), strict=True
    ):
        for key, value in wanted.items():
            if value is not None:
                assert_close(state[key], value)
    assert after.fallbacks == before.fallbacks
    assert after.compiles - before.compiles <= 2  # the first step makes the states


@pytest.mark.parametrize(
    "name", ["add", "addcmul", "addcdiv", "lerp", "norm", "maximum", "clamp_max", "pow", "copy", "sqrt"]
)
@torch.no_grad()
def test_lists_of_tensors(name: str, recorder: Recorder) -> None:
    torch.manual_seed(0)
    x, y, z = ([torch.rand(n, 3) + 0.5 for n in (1, 2, 4)] for _ in range(3))
    numbers = [0.5, 2.0, 3.0]
    calls = {
        "add": [(x, y), (x, 2.0), (x, numbers), (x, torch.tensor(2.0))],
        "addcmul": [(x, y, z), (x, y, z, 0.5), (x, y, z, numbers)],
        "addcdiv": [(x, y, z), (x, y, z, 0.5), (x, y, z, numbers)],
        "lerp": [(x, y, z), (x, y, 0.3), (x, y, numbers)],
        "norm": [(x,), (x, 1), (x, float("inf"))],
        "maximum": [(x, y), (x, 1.0), (x, numbers)],
        "clamp_max": [(x, y), (x, 1.0), (x, numbers)],
        "pow": [(x, y), (x, 2), (x, numbers), (2.0, x)],
        "copy": [(x, y)],
        "sqrt": [(x,)],
    }[name]
    op = getattr(torch, f"_foreach_{name}") if name != "copy" else torch.ops.aten._foreach_copy
    before = recorder.snapshot()
    for call in calls:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args: op(*args), backend="dynaxla")
        for mine, wanted in zip(compiled(*call), op(*call), strict=True):
            assert_close(mine, wanted)
    assert recorder.snapshot().fallbacks == before.fallbacks
