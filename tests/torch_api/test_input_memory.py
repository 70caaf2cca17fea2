"""Inputs that a graph gives the memory that they have: Dynamo's form of it, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dynaxla.errors import UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.torch_api.input_memory import drop_own_memory
from tests.tolerances import assert_close
from tests.torch_api.boundary import boundary


class Net(nn.Module):
    """A layer that each call moves to where it is, by one of several idioms."""

    def __init__(self, move: Callable[[nn.Linear, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.move = nn.Linear(4, 4), move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move(self.layer, x)
        return self.layer(x)  # type: ignore[no-any-return]


def set_data(layer: nn.Linear, data: torch.Tensor) -> None:
    layer.weight.data = data


NO_MOVES: dict[str, Callable[[nn.Linear, torch.Tensor], object]] = {
    "to a device": lambda layer, x: layer.to(x.device),
    "to a dtype": lambda layer, x: layer.to(x.dtype),
    "twice": lambda layer, x: layer.to(x.device).to(x.device),
    "to what a tensor has": lambda layer, x: set_data(layer, layer.weight.to(x)),
    "its data": lambda layer, x: set_data(layer, layer.weight.data.to(device=x.device, dtype=x.dtype)),
}
MOVES: dict[str, Callable[[nn.Linear, torch.Tensor], object]] = {
    "a copy": lambda layer, x: set_data(layer, layer.weight.data.to(x.device, copy=True)),
    "a result": lambda layer, x: set_data(layer, layer.weight.data * 2),
    "another tensor": lambda layer, x: set_data(layer, x.to(x.device)),
}


@boundary("input_memory.drop_own_memory")
def test_dynamo_gives_memory_by_set() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    def swaps() -> int:
        return len(graphs[0].graph.find_nodes(op="call_function", target=torch.Tensor.set_))

    torch.compile(Net(NO_MOVES["to a device"]), backend=keep)(torch.randn(2, 4))
    assert swaps() == 2
    drop_own_memory(graphs[0])
    assert swaps() == 0
    assert "version" not in str(graphs[0].graph)


@pytest.mark.parametrize("name", NO_MOVES)
def test_layers_that_are_moved_to_where_they_are_are_compiled(name: str, recorder: Recorder) -> None:
    net, x = Net(NO_MOVES[name]), torch.randn(3, 4)
    weight, version, address = net.layer.weight, net.layer.weight._version, net.layer.weight.data_ptr()
    compiled = torch.compile(net, backend="dynaxla", options={"fallback": "error"})
    found = []
    with recorder.expect(graphs=2, eager_ops=0):
        for run in (compiled, net):
            found.append((run(x), *torch.autograd.grad(run(x).square().sum(), list(net.parameters()))))
    for mine, wanted in zip(*found, strict=True):
        assert_close(mine, wanted)
    assert net.layer.weight is weight
    assert (weight._version, weight.data_ptr()) == (version, address)


@pytest.mark.parametrize("name", MOVES)
def test_other_memory_is_refused_as_before(name: str) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(UnsupportedError, match="other memory"):
        torch.compile(Net(MOVES[name]), backend="dynaxla", options={"fallback": "error"})(x)
    ours, eagers = (Net(MOVES[name]) for _ in range(2))
    ours.load_state_dict(eagers.state_dict())
    for run in (torch.compile(ours, backend="dynaxla"), eagers):
        run(x)
    assert_close(ours.layer.weight.detach(), eagers.layer.weight.detach())
