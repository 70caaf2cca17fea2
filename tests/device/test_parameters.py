"""Modules that come to the device, or leave it, keep their parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.tolerances import assert_close


def tied() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize("compiles", [False, True])
def test_tied_parameters_stay_tied(compiles: bool) -> None:
    torch._dynamo.reset()
    net, x = tied(), torch.randn(2, 4)
    mine = copy.deepcopy(net).to("dynaxla")
    assert mine[0].weight is mine[1].weight
    run = torch.compile(mine, backend="dynaxla") if compiles else mine
    run(x.to("dynaxla")).square().sum().backward()
    net(x).square().sum().backward()
    assert_close(mine[0].weight.grad.cpu(), net[0].weight.grad)


def test_an_optimizer_that_was_made_before_has_them() -> None:
    net = tied()
    optimizer, weight = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net[0].weight
    for device in ("cpu", "dynaxla", "cpu"):
        assert net.to(device)[0].weight is weight
        assert weight.device.type == device
        assert weight.is_leaf
        net(torch.ones(2, 4, device=device)).sum().backward()
        if device == "cpu":  # momentum stays where it was made
            before = weight.detach().clone()
            optimizer.step()
            assert not torch.equal(before, weight.detach())
        assert weight.grad is not None
        assert weight.grad.device.type == device


def test_other_conversions_are_torchs() -> None:
    net = tied()
    weight, address = net[0].weight, net[0].weight.data_ptr()
    assert net.to("cpu")[0].weight.data_ptr() == address
    assert net.double()[0].weight is weight
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_from_nothing() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    assert net.to_empty(device="dynaxla").weight.device.type == "dynaxla"


def test_an_error_leaves_torch_as_it_was() -> None:
    def refused(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            raise ValueError("no")
        return tensor.to("dynaxla")

    with pytest.raises(ValueError, match="no"):
        tied()._apply(refused)
    assert not torch.__future__.get_swap_module_params_on_conversion()
