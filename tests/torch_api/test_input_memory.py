"""Inputs that a graph gives the memory that they have, and what captures take for granted of inputs' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.errors import UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.torch_api.input_memory import InputMemory, drop_own_memory, find_input_memory, writes_at_a_place
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


def find_of(function: Callable[..., Any], *args: torch.Tensor) -> InputMemory | None:
    """What is taken for granted of the inputs of a function's first graph."""
    found: list[InputMemory | None] = []

    def keep(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(find_input_memory(module))
        return module.forward

    torch.compile(function, backend=keep)(*args)
    return found[0]


class Cache(nn.Module):
    """Writes to a buffer, which Dynamo gives the graph as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.kept.add_(x)
        return self.kept * y


@boundary("input_memory.find_input_memory")
def test_what_a_capture_takes_for_granted() -> None:
    x, y = torch.zeros(4), torch.ones(4)
    assert find_of(lambda x, y: x + y, x, y) is None
    assert find_of(lambda x, y: x.add(1).mul_(2) + y, x, y) is None
    assert find_of(lambda x: x.mul_(2), x) is None
    assert find_of(lambda x, y: x.mul_(2) + y, x, y) == InputMemory((), (0, 1))
    assert find_of(lambda x, y: x.view(2, 2)[0].mul_(2) + y[:2], x, y) == InputMemory((), (0, 1))
    assert find_of(lambda x, y: (x.mul_(2), y[:2]), x, y) == InputMemory((), (0, 1), gives_views=True)
    assert find_of(lambda x, y: x.as_strided((2,), (1,)) + y[:2], x, y) is None
    assert find_of(lambda x, y: x.as_strided((2,), (1,), 1) + y[:2], x, y) == InputMemory((0, 1), ())
    assert find_of(Cache(), x, y) is None


@boundary("input_memory.InputMemory")
def test_where_inputs_lie() -> None:
    memory, whole = torch.zeros(12), torch.zeros(4)
    shared, columns = InputMemory((), (0, 1)), memory.view(3, 4)
    assert shared.read([whole, memory[:4]]) == shared.read([memory[:4], memory[4:8]]) == ((), ())
    assert shared.read([columns[:, :2], columns[:, 2:]]) == ((), ())
    assert shared.read([memory[:4], memory[3:7]]) == ((), (((0, 0), (1, 3)),))
    assert InputMemory((0,), ()).read([memory[3:]]) == ((3,), ())
    assert shared.is_captured(((), ((0, 0), (1, 3))))
    assert not InputMemory((), (0, 1), gives_views=True).is_captured(((), ((0, 0), (1, 3))))
    assert InputMemory((), (0, 1), gives_views=True).is_captured(((), ()))


@boundary("input_memory.writes_at_a_place")
def test_aot_autograd_writes_at_the_place_in_an_input() -> None:
    """Why graphs are refused that `writes_at_a_place` finds: eager counts from the start of the storage."""

    def write(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((2,), (1,), 3).mul_(0)
        return x + 0

    def is_found(x: torch.Tensor) -> bool:
        found: list[bool] = []

        def keep(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append(writes_at_a_place(module))
            return module.forward

        torch._dynamo.reset()
        torch.compile(write, backend=keep)(x)
        return found[0]

    memory = torch.ones(8, requires_grad=True)
    assert write((memory * 1)[2:]).tolist() == [1, 0, 0, 1, 1, 1]
    torch._dynamo.reset()
    assert torch.compile(write, backend="aot_eager")((memory * 1)[2:]).tolist() == [1, 1, 1, 0, 0, 1]
    assert is_found((memory * 1)[2:])
    assert not is_found(memory * 1)
    assert not is_found(torch.ones(8)[2:])
