"""torchao: linear layers whose weights are int8, tensors of a subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

CONFIGS = [  # by themselves they change Inductor's settings for the whole process
    Int8WeightOnlyConfig(set_inductor_config=False),
    Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("config", CONFIGS, ids=["weights", "weights and activations"])
@torch.no_grad()
def test_linear_layers(config: Any, recorder: Recorder) -> None:
    """torchao's scale puts the largest number of a row between two integers: quotients have to be eager's to the last digit."""
    torch.manual_seed(1)
    net = Net().eval()
    quantize_(net, config)
    assert type(net.first.weight) is not nn.Parameter
    compiled = torch.compile(net.first, backend="dynaxla")
    before = recorder.snapshot()
    for rows in (4, 7, 9, 1):
        x = torch.randn(rows, 64)
        assert_close(compiled(x), net.first(x))
    whole = torch.compile(net, backend="dynaxla")
    x = torch.randn(4, 64)
    ours, wanted = whole(x), net(x)
    quantum = 1e-2 * wanted.abs().max()  # a hidden number between two integers may go to the other one
    assert (ours - wanted).abs().max() <= quantum
    assert recorder.snapshot().fallbacks == before.fallbacks
