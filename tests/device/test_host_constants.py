"""What a function makes on the host, of nothing but numbers, and then moves is made where it is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder


def _frequencies(x: Tensor) -> Tensor:
    """As rotary positions are made where nobody names a device."""
    inverse = 1.0 / (10000.0 ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1]))
    angles = torch.outer(torch.arange(x.shape[0]).float(), inverse)
    return torch.cat([angles.cos(), angles.sin()], -1).to(x.device, x.dtype)


def _positions(x: Tensor) -> Tensor:
    return x * _frequencies(x) + torch.ones(x.shape[-1]).to(x.device)


def _mask(x: Tensor) -> Tensor:
    causal = torch.full((x.shape[0], x.shape[0]), -1.0).triu(1)
    return (x @ x.t()) + causal.to(x.device)


def _number(x: Tensor) -> Tensor:
    return x * torch.scalar_tensor(3.0) + torch.full((), 2)


def _looping(x: Tensor) -> Tensor:
    def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, _positions(x).tanh()

    return torch.while_loop(lambda i, x: i < 3, step, (torch.zeros((), dtype=torch.int64, device=x.device), x))[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_positions, _mask, _number, _looping])
def test_nothing_runs_on_the_host(
    function: Callable[[Tensor], Tensor], dynamic: bool, device: torch.device, recorder: Recorder
) -> None:
    before = recorder.snapshot().fallbacks
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    with recorder.expect(eager_ops=0):
        for rows in (5, 7) if dynamic else (5,):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x.to(device)).cpu(), function(x), rtol=1e-4, atol=1e-4)
    assert recorder.snapshot().fallbacks == before


def test_numbers_beside_batched_tensors(device: torch.device, recorder: Recorder) -> None:
    """vmap makes a tensor of the host of each, which the backward reads."""
    before = recorder.snapshot().fallbacks
    x = torch.randn(5, 6)
    here, there = x.clone().requires_grad_(), x.to(device).requires_grad_()
    scaled = torch.vmap(lambda row: (row * row / 8).tanh() * 3)
    scaled(here).sum().backward()
    with recorder.expect(eager_ops=0):
        torch.compile(scaled, backend="dynaxla")(there).sum().backward()
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-5)
    assert recorder.snapshot().fallbacks == before


def test_gradients(device: torch.device, recorder: Recorder) -> None:
    x = torch.randn(5, 6)
    before = recorder.snapshot().fallbacks
    here, there = x.clone().requires_grad_(), x.to(device).requires_grad_()
    _positions(here).square().sum().backward()
    torch.compile(_positions, backend="dynaxla")(there).square().sum().backward()
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-4)
    assert recorder.snapshot().fallbacks == before


def test_what_the_caller_or_the_host_asks_for_stays(device: torch.device) -> None:
    def both(x: Tensor, host: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps = torch.arange(4).float()
        return x + steps.to(x.device), steps * 2, host + torch.ones(4)

    x, host = torch.randn(4), torch.randn(4)
    found = torch.compile(both, backend="dynaxla")(x.to(device), host)
    assert [each.device.type for each in found] == [device.type, "cpu", "cpu"]
    for mine, theirs in zip(found, both(x, host), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


def test_draws_differ_from_call_to_call_and_repeat_after_a_seed(device: torch.device) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(4).to(x.device) + torch.nn.functional.dropout(torch.ones(4), 0.5).to(x.device)

    compiled, x = torch.compile(noisy, backend="dynaxla"), torch.zeros(4, device=device)
    torch.manual_seed(3)
    first, second = compiled(x).cpu(), compiled(x).cpu()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(compiled(x).cpu(), first)
