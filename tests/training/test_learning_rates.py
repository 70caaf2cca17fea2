"""Learning rates that change under `torch.compile(optimizer.step)`: how often Dynamo captures the step, eager's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, LambdaLR, LRScheduler, OneCycleLR

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.training.stepping import compare, compiled, draw, in_eager, mlp

Make = Callable[[Iterator[nn.Parameter], "float | Tensor"], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]
STEPS = 7

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr),
    "sgd with momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda p, lr: torch.optim.SGD(p, lr, foreach=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr),
    "adadelta": lambda p, lr: torch.optim.Adadelta(p, lr),
    "nadam": lambda p, lr: torch.optim.NAdam(p, lr),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr),
    "rmsprop foreach": lambda p, lr: torch.optim.RMSprop(p, lr, foreach=True),
    "muon": lambda p, lr: torch.optim.Muon([each for each in p if each.dim() == 2], lr),
}
SCHEDULES: dict[str, MakeSchedule] = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.8),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1, cycle_momentum=False),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
}


def graphs_of_steps(
    make: Make, rate: float | Tensor, make_schedule: MakeSchedule, recorder: Recorder, dtype: torch.dtype
) -> list[int]:
    """Graphs captured in each step; after each the parameters are eager's, gradients being the same."""
    net = mlp().to(dtype)
    twin = copy.deepcopy(net)
    optimizers = [make(each.parameters(), copy.deepcopy(rate)) for each in (net, twin)]
    schedules = [make_schedule(optimizer) for optimizer in optimizers]
    steps = [compiled(optimizers[0].step), in_eager(optimizers[1].step)]
    graphs = []
    for seed in range(STEPS):
        x, labels = draw(seed)
        net.zero_grad()
        F.cross_entropy(net(x.to(dtype)), labels).backward()
        for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
            other.grad = parameter.grad
        before = recorder.snapshot().graphs
        for step, schedule in zip(steps, schedules, strict=True):
            step()
            schedule.step()
        graphs.append(recorder.snapshot().graphs - before)
        compare(net, twin)
    return graphs


@pytest.mark.parametrize("schedule", quick(SCHEDULES, "exponential", "one cycle"))
def test_a_rate_in_a_tensor_is_captured_once(schedule: str, recorder: Recorder) -> None:
    """AdamW makes its states in the first step."""
    found = graphs_of_steps(OPTIMIZERS["adamw"], torch.tensor(0.01), SCHEDULES[schedule], recorder, torch.float32)
    assert found == [1] + [0] * (STEPS - 1)


@pytest.mark.parametrize(
    "name", quick(OPTIMIZERS, "sgd with momentum", "adamw", "adadelta", "nadam", "rmsprop foreach", "muon")
)
def test_a_rate_that_is_a_number_becomes_an_input(name: str, recorder: Recorder) -> None:
    """Dynamo guards on the first number and makes an input of it when the second one comes."""
    found = graphs_of_steps(OPTIMIZERS[name], 0.01, SCHEDULES["exponential"], recorder, torch.float32)
    assert sum(found[2:]) == 0
    assert sum(found) <= 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_round_as_in_eager(dtype: torch.dtype, recorder: Recorder) -> None:
    found = graphs_of_steps(OPTIMIZERS["sgd with momentum"], 0.1, SCHEDULES["exponential"], recorder, dtype)
    assert sum(found[2:]) == 0
