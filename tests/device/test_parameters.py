"""Modules that come to the device, or leave it, keep their parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

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


def test_from_nothing() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    before = net.weight
    assert net.to_empty(device="dynaxla").weight.device.type == "dynaxla"
    assert before.is_meta
    assert net.weight is not before, "torch replaces parameters on meta by new ones, on every device"


def test_what_hangs_at_a_parameter_stays() -> None:
    net, there = nn.Linear(3, 2), "dynaxla"
    weight = net.weight
    accumulated: list[torch.Tensor] = []
    weight.told, refers = "mine", weakref.ref(weight)
    doubled = weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(accumulated.append)
    for device, factor in ((there, 2), ("cpu", 2)):
        net.to(device)
        net.zero_grad()
        net(torch.ones(1, 3, device=device)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device.type == device
        assert weight.grad.tolist() == [[factor] * 3] * 2
    assert (len(accumulated), weight.told, refers()) == (2, "mine", weight)
    doubled.remove()
    net.zero_grad()
    net.to(there)(torch.ones(1, 3, device=there)).sum().backward()
    assert weight.grad.tolist() == [[1] * 3] * 2


def test_gradients_come_along() -> None:
    net = nn.Linear(3, 2)
    net(torch.ones(1, 3)).sum().backward()
    gradient = net.weight.grad
    for device in ("dynaxla", "cpu"):
        assert net.to(device).weight.grad is gradient
        assert gradient.device.type == device
        assert gradient.tolist() == [[1] * 3] * 2


def test_a_backward_from_before_is_refused() -> None:
    net = nn.Linear(3, 2)
    result = net(torch.ones(1, 3))
    net.to("dynaxla")
    with pytest.raises(RuntimeError, match="between its forward and its backward"):
        result.sum().backward()
    assert net.weight.grad is None


def test_a_module_moves_while_results_of_it_are_kept() -> None:
    """As CUDA's do: what eager gave is compared with what the device gives. A backward of the kept results is refused."""
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), torch.ones(1, 3)
    expected, weight = net(x), net[1].weight
    assert net.to("dynaxla")[1].weight is weight
    result = net(x.to("dynaxla"))
    assert_close(result.detach().cpu(), expected.detach())
    with pytest.raises(RuntimeError, match="between its forward and its backward"):
        expected.sum().backward()
    assert weight.grad is None
    result.sum().backward()
    mine = [parameter.grad.cpu() for parameter in net.parameters()]
    net.cpu().zero_grad()
    net(x).sum().backward()
    for gradient, parameter in zip(mine, net.parameters(), strict=True):
        assert_close(gradient, parameter.grad)


def test_gradients_of_inputs_from_before_are_those_of_the_weights_from_before() -> None:
    net, x = nn.Linear(3, 2).requires_grad_(False), torch.ones(1, 3, requires_grad=True)
    result, expected = net(x), net.weight.sum(0)
    net.to("dynaxla").weight.data.zero_()
    result.sum().backward()
    assert_close(x.grad[0], expected)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_that_keep_what_they_made_of_a_parameter(norm: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = norm(nn.Linear(3, 2)), torch.ones(1, 3)
    net(x)
    there = norm(nn.Linear(3, 2))
    there.load_state_dict(net.state_dict())
    there(x)
    there.load_state_dict(net.state_dict())
    there.to("dynaxla")(x.to("dynaxla")).square().sum().backward()
    net(x).square().sum().backward()
    for mine, its in zip(there.parameters(), net.parameters(), strict=True):
        assert_close(mine.grad.cpu(), its.grad)


def test_parameters_that_cpp_holds_stay_where_they_are() -> None:
    net = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="RecursiveScriptModule"):
        net.to("dynaxla")
    assert net.weight.device.type == "cpu"


@pytest.mark.parametrize("make", [partial(nn.LazyLinear, 2), partial(nn.LazyConv2d, 2, 1), nn.LazyBatchNorm2d])
def test_lazy_modules_stay_lazy(make: Callable[[], nn.Module]) -> None:
    net = make().to("dynaxla").cpu().to("dynaxla")
    optimizer = torch.optim.SGD([weight := net.weight], 0.1)
    assert is_lazy(weight)
    result = net(torch.ones(2, 3, 4, 4, device="dynaxla"))
    assert not is_lazy(weight)
    assert result.device.type == weight.device.type == "dynaxla"
    assert "Lazy" not in type(net).__name__
    result.square().sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert net.weight is weight
    assert_close(weight.detach().cpu(), (before - 0.1 * weight.grad).cpu())


def test_an_error_leaves_parameters_as_they_were() -> None:
    def refused(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            raise ValueError("no")
        return tensor.to("dynaxla")

    net = nn.LazyLinear(3)
    net.bias = nn.Parameter(torch.ones(3))
    net.bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match="no"):
        net._apply(refused)
    assert net.bias.grad is not None
    assert is_lazy(net.weight)
