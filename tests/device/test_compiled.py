"""Compiled graphs on tensors of the device: eager's numbers, and no copy but of what goes in and of what is read."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.device import compiled_graphs, copies, cpu_fallback, dispatcher
from dynaxla.errors import DynaxlaError
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.weight_residency import PartWeights
from tests.tolerances import assert_close

DEVICE = "dynaxla"


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=dynamic, options={"fallback": "error", **options})


def there(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def agree(function: Callable[..., Any], *args: Any, on_device: Callable[..., Any] | None = None) -> None:
    """Results, their strides and what was written to the arguments are eager's."""
    mine = [there(arg) for arg in args]
    found = (on_device or compiled(function))(*mine)
    wanted = function(*args)
    for one, other in zip(_flat((found, mine)), _flat((wanted, args)), strict=True):
        if isinstance(other, Tensor):
            assert one.device.type == DEVICE
            assert one.stride() == other.stride()
            assert_close(one.detach().cpu(), other.detach())
        else:
            assert one == other


def _flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, (tuple, list)) else [value]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Softmax(0), nn.LayerNorm(16), nn.Linear(16, 3))


@torch.no_grad()
def test_sizes_that_vary(recorder: Recorder) -> None:
    model = mlp()
    on_device = compiled(copy.deepcopy(model).to(DEVICE), buckets=dynaxla.Explicit((8, 16)))
    for rows in (5, 7, 8, 12, 16):
        agree(model, torch.randn(rows, 8), on_device=on_device)
    before = recorder.snapshot().host_ops
    with recorder.expect(compiles=0):
        agree(model, torch.randn(7, 8), on_device=on_device)
    assert recorder.snapshot().host_ops == before


def add_arange(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0], device=x.device) + torch.full((1,), 2.0, device=x.device) + torch.tensor(3.0)


def write(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    x[1:3] = 0
    return x.sum(), x.shape[0]


def several(x: Tensor) -> Any:
    return x.t(), x[1:] + 1, x, x.sum(), x.shape[0] * 2


def integers(x: Tensor) -> Any:
    x = (x * 10).to(torch.int64)
    return x // 3, x % 5, x > 2, x.sum(), x.bool().any()


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (add_arange, (torch.randn(5),)),
        (write, (torch.randn(6), torch.randn(6))),
        (several, (torch.randn(6, 8),)),
        (integers, (torch.randn(6, 8),)),
        (lambda x, s: x * s, (torch.randn(4), 2.5)),
        (lambda x, s: x * s, (torch.randn(4), 3)),
    ],
)
def test_functions(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    agree(function, *args)


def test_views_go_in() -> None:
    x = torch.randn(6, 8)
    there, on_device = x.to(DEVICE), compiled(lambda a: a.t() @ a)
    for view in (lambda a: a[1:4, ::2], lambda a: a.t()[2:5], lambda a: a[3:], lambda a: a.expand(6, 8)):
        assert_close(on_device(view(there)).cpu(), view(x).t() @ view(x))


def test_numbers_of_the_host_go_in() -> None:
    x = torch.randn(4)
    assert_close(compiled(lambda x, s: x * s)(x.to(DEVICE), torch.tensor(2.0)).cpu(), x * 2)


def test_other_tensors_of_the_host_do_not() -> None:
    with pytest.raises((RuntimeError, DynaxlaError)):
        compiled(lambda x, y: x + y)(torch.ones(3, device=DEVICE), torch.ones(3))


def test_a_layer_that_is_moved_to_where_it_is_is_compiled(recorder: Recorder) -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with recorder.expect(eager_ops=0):
        y = compiled(lambda x: layer.to(x.device)(x))(x)
        y.sum().backward()
    torch.testing.assert_close(y, layer(x))


@torch.no_grad()
def test_weights_are_followed() -> None:
    """Written in place, through `data`, by another storage, or loaded: the next call has them."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    mine = copy.deepcopy(model).to(DEVICE)
    on_device = compiled(mine)

    def other_storage(net: nn.Module) -> None:
        net.weight.data = net.weight.data + 1

    def loaded(net: nn.Module) -> None:
        net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})

    changes: list[Callable[[nn.Module], Any]] = [
        lambda net: None,
        lambda net: net.weight.mul_(2),
        other_storage,
        lambda net: net.weight.data.mul_(3),
        lambda net: net.weight[1:].zero_(),
        loaded,
    ]
    for change in changes:
        change(model)
        change(mine)
        assert_close(on_device(x.to(DEVICE)).cpu(), model(x))


@torch.no_grad()
@torch.no_grad()
def test_weights_whose_binding_was_interrupted_are_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was bound before the write is out of date, whatever became of the call that came upon it."""
    net = nn.Linear(3, 3).to(DEVICE)
    function, x = compiled(net), torch.randn(2, 3)
    function(there(x))
    net.weight.mul_(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(PartWeights, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            function(there(x))
    assert_close(function(there(x)).cpu(), x @ net.weight.cpu().T + net.bias.cpu())


def test_a_number_of_the_host_among_the_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(3)), torch.tensor(2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    mine, x = Scaled().to(DEVICE), torch.randn(3)
    on_device = compiled(mine)
    for scale in (2.0, 5.0):
        mine.scale.fill_(scale)
        assert_close(on_device(x.to(DEVICE)).cpu(), x * scale)


def test_threads() -> None:
    model = mlp().eval()
    on_device = compiled(copy.deepcopy(model).to(DEVICE))
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for rows in (4, 6, 4, 6):
            x = torch.randn(rows, 8, generator=generator)
            with torch.no_grad():
                found, wanted = on_device(x.to(DEVICE)).cpu(), model(x)
            if not torch.allclose(found, wanted, atol=1e-5):
                wrong.append((seed, rows))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training(optimizer: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
    mine = copy.deepcopy(model).to(DEVICE)
    on_device = compiled(mine)
    steps = [
        (model, optimizer(model.parameters(), 1e-2), "cpu"),
        (on_device, optimizer(mine.parameters(), 1e-2), DEVICE),
    ]
    for _ in range(3):
        x, labels = torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
        for run, chosen, device in steps:
            chosen.zero_grad()
            nn.functional.cross_entropy(run(x.to(device)), labels.to(device)).backward()
            chosen.step()
    for own, eagers in zip(mine.state_dict().values(), model.state_dict().values(), strict=True):
        assert_close(own.cpu(), eagers)


def test_draws_follow_the_devices_seed(recorder: Recorder) -> None:
    on_device, x = compiled(lambda x: nn.functional.dropout(x, 0.5)), torch.ones(1000, device=DEVICE)
    drawn, before = [], recorder.snapshot().host_ops
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(on_device(x).cpu())
    assert recorder.snapshot().host_ops == before
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(on_device(x).cpu(), drawn[0])
    assert 300 < (drawn[0] == 0).sum() < 700


def test_autocast() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    mine = copy.deepcopy(model).to(DEVICE)

    def run(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return net(x)

    found = compiled(lambda x: run(mine, x))(x.to(DEVICE))
    assert found.dtype is torch.bfloat16
    assert_close(found.detach().cpu(), run(model, x).detach())


def test_what_runs_in_eager_runs_on_the_device_between_parts() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin().nonzero().float().sum() + x.cos()).exp()

    agree(function, torch.randn(5), on_device=torch.compile(function, backend="dynaxla"))


def test_layers_that_dynamo_leaves_to_eager() -> None:
    """Dynamo looks at no kernel of the device meanwhile."""
    model, x = nn.LSTM(4, 8, batch_first=True), torch.randn(2, 5, 4)
    left = torch.compiler.disable(copy.deepcopy(model).to(DEVICE))
    mine = torch.compile(lambda x: left(x), backend="dynaxla")
    with torch.no_grad():
        assert_close(mine(x.to(DEVICE))[0].cpu(), model(x)[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_and_their_gradients_are_programs(kind: type[nn.Module], bias: bool) -> None:
    """torch calls them as ops that it has on other devices alone; of one of these it does not know the sizes."""
    cell, x = kind(4, 8, bias=bias), torch.randn(2, 4)
    mine = copy.deepcopy(cell).to(DEVICE)
    wanted, found = cell(x), compiled(mine)(x.to(DEVICE))
    wanted, found = (out if isinstance(out, Tensor) else out[0] + out[1] for out in (wanted, found))
    wanted.cos().sum().backward()
    found.cos().sum().backward()
    assert_close(found.detach().cpu(), wanted.detach())
    for its, own in zip(cell.parameters(), mine.parameters(), strict=True):
        assert_close(own.grad.cpu(), its.grad)  # type: ignore[union-attr]


def test_only_what_goes_in_or_is_read_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs with two breaks."""
    counted: list[str] = []

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*args: Any) -> Any:
            counted.append(name)
            return own(*args)

        return copy

    for module in (compiled_graphs, copies, dispatcher, cpu_fallback):
        for name in ("upload", "upload_readonly", "download"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counting(name, getattr(module, name)))

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        y = y.cos() if y.sum() > 100 else y.exp()
        return y * 2

    on_device, x = torch.compile(function, backend="dynaxla"), torch.randn(5)
    on_device(x.to(DEVICE))
    counted.clear()
    found = on_device(x.to(DEVICE))
    assert counted == ["upload_readonly", "download"]  # x, and the sum that the branch reads
    assert_close(found.cpu(), function(x))
