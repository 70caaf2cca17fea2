"""Models train on the device for eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerances import assert_close
from tests.training.images import check_step


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def _convolutions() -> nn.Module:
    body = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Conv2d(4, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def _train(model: nn.Module, x: torch.Tensor, optimizer: Callable[..., Any], steps: int = 5) -> list[torch.Tensor]:
    chosen = optimizer(model.parameters())
    target = torch.arange(len(x), device=x.device) % 4
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        chosen.step()
        losses.append(loss.detach())
    return losses


def _compare(model: nn.Module, x: torch.Tensor, optimizer: Callable[..., Any]) -> None:
    there = copy.deepcopy(model).to("dynaxla")
    expected = _train(model, x, optimizer)
    actual = _train(there, x.to("dynaxla"), optimizer)
    assert_close(torch.stack(actual).cpu(), torch.stack(expected))
    for (name, mine), its in zip(there.state_dict().items(), model.state_dict().values(), strict=True):
        assert mine.device.type == "dynaxla", name
        assert_close(mine.cpu(), its)


def test_an_mlp() -> None:
    torch.manual_seed(0)
    _compare(_mlp(), torch.randn(6, 8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


def test_convolutions() -> None:
    torch.manual_seed(0)
    _compare(_convolutions(), torch.randn(4, 1, 8, 8), lambda p: torch.optim.Adam(p, 0.01))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adagrad"])
def test_optimizers(kind: str, foreach: bool) -> None:
    torch.manual_seed(0)
    make = getattr(torch.optim, kind)
    _compare(nn.Linear(8, 4), torch.randn(6, 8), lambda p: make(p, 0.05, foreach=foreach))


def test_a_schedule_compiles_nothing_new() -> None:
    import dynaxla

    model = nn.Linear(4, 4).to("dynaxla")
    optimizer = torch.optim.Adam(model.parameters(), 0.1, foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(3, 4, device="dynaxla")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()

    for _ in range(2):
        step()
    with dynaxla.recorder().expect(compiles=0):
        for _ in range(3):
            step()


def test_autograd_of_views_and_writes() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = x * 2
        y[1:].mul_(x[:-1])
        z = y.t().contiguous().view(-1)[::2]
        z.pow(2).sum().backward()
        assert x.grad is not None
        return [z.detach(), x.grad]

    x = torch.randn(4, 3)
    for mine, its in zip(run(x.to("dynaxla")), run(x), strict=True):
        assert_close(mine.cpu(), its)


def test_gradients_of_gradients_and_hooks() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        seen: list[torch.Tensor] = []
        x.register_hook(seen.append)
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.sum().backward()
        return seen[0].detach() + (x.grad if x.grad is not None else 0)

    x = torch.randn(5)
    assert_close(run(x.to("dynaxla")).cpu(), run(x))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_gradients_of_gradients_of_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return [each.cpu() for each in torch.autograd.grad(slope.square().sum(), (x, *layer.parameters()))]

    layer = kind(2, 3)
    there, x = copy.deepcopy(layer).to("dynaxla"), torch.randn(3, 2, 2)
    for mine, its in zip(run(there, x.to("dynaxla")), run(layer, x), strict=True):
        assert_close(mine, its)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_gradients_of_recurrent_layers_in_vmap(kind: type[nn.RNNBase]) -> None:
    """That of `is_grads_batched`, and that of torch.func, for which eager has rules for an LSTM alone."""

    def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        found = list(torch.autograd.grad(layer(x)[0], leaves, directions.to(x.device), is_grads_batched=True))
        if kind is nn.LSTM:
            loss = lambda x, weights: torch.func.functional_call(layer, weights, (x,))[0].square().sum()  # noqa: E731
            weights = dict(layer.named_parameters())
            found.append(torch.func.vmap(torch.func.grad(loss), (0, None))(torch.stack([x, x * 2]).detach(), weights))
        return [each.detach().cpu() for each in found]

    layer, directions = kind(2, 3), torch.randn(4, 3, 2, 3)
    results = []
    for device in ("cpu", "dynaxla"):
        there, x = copy.deepcopy(layer).to(device), torch.ones(3, 2, 2, device=device).requires_grad_()
        leaves = [x, *there.parameters()]
        results.append(run(there, x))
    for mine, its in zip(*results, strict=True):
        assert_close(mine, its)


@pytest.mark.parametrize("lay", [torch.clone, lambda x: x.t().clone().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_gradients_of_determinants_of_any_layout(lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = lay(x).requires_grad_()
        results = torch.linalg.det(x), torch.linalg.slogdet(x)[1], torch.linalg.solve(x, x[0]).sum()
        return [torch.autograd.grad(result, x)[0].cpu() for result in results]

    x = torch.randn(4, 4) + 3 * torch.eye(4)
    for mine, its in zip(run(x.to("dynaxla")), run(x), strict=True):
        assert_close(mine, its)


def test_gradients_are_clipped_and_scaled() -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    model = nn.Linear(4, 3)
    there = copy.deepcopy(model).to("dynaxla")
    x = torch.randn(2, 4)
    assert_close(run(there, x.to("dynaxla")).cpu(), run(model, x))
    assert_close(there.weight.grad.cpu(), model.weight.grad)  # type: ignore[union-attr]


@pytest.mark.long
def test_recurrent_and_attention_layers() -> None:
    torch.manual_seed(0)
    for layer, x in (
        (nn.LSTM(4, 5, batch_first=True), torch.randn(2, 3, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)),
        (nn.GRU(4, 5), torch.randn(2, 3, 4)),
        (nn.Embedding(10, 4), torch.tensor([[1, 2], [3, 9]])),
    ):
        there = copy.deepcopy(layer).to("dynaxla")
        here_out, there_out = layer(x), there(x.to("dynaxla"))
        first = (lambda out: out[0]) if isinstance(here_out, tuple) else (lambda out: out)
        first(here_out).cos().sum().backward()
        first(there_out).cos().sum().backward()
        assert_close(first(there_out).detach().cpu(), first(here_out).detach())
        for mine, its in zip(there.parameters(), layer.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert_close(mine.grad.cpu(), its.grad)


def test_a_network_of_images_trains(device: torch.device) -> None:
    check_step(device.type, torch.contiguous_format)
