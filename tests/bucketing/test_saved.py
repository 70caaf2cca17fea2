"""What a bucketed forward saves for its backward stays in padded memory, and nobody else sees that."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

import dynaxla
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.observe.recorder import Recorder
from dynaxla.programs import argument_binder
from dynaxla.runtime.host_padding import PaddedShape
from tests.bucketing.poison import pad_small_arguments, poison
from tests.tolerances import assert_close

SIZES = ((5, 9), (6, 12), (7, 11))  # of the bucket (8, 16)
BUCKETS = {"buckets": dynaxla.Explicit((8, 16))}


class Attending(nn.Module):
    """Heads that lie transposed, products of merged dims, a norm, and a mean over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, 4).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return self.out(self.norm(F.gelu(y))).mean(1)


def gradients(net: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    given = x.clone().requires_grad_()
    call(given).square().sum().backward()
    return {"input": given.grad, **{name: p.grad for name, p in net.named_parameters()}}  # type: ignore[dict-item]


def check(net: nn.Module, call: Any, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    twin = copy.deepcopy(net)
    for batch, length in sizes:
        x = torch.randn(batch, length, 8)
        mine, eager = gradients(net, call, x), gradients(twin, twin, x)
        for name, wanted in eager.items():
            assert_close(mine[name], wanted)


def test_rows_that_are_all_one_row_are_saved_whole(recorder: Recorder) -> None:
    """By an envelope made for one row and broadcast, each signal is divided."""
    window = torch.hann_window(8)

    def there_and_back(x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 8, 4, window=window, return_complex=True)
        return torch.istft(spectrum, 8, 4, window=window, length=x.shape[1])

    compiled = torch.compile(there_and_back, backend="dynaxla", dynamic=True)
    with recorder.expect(eager_ops=0):
        for rows in (6, 5, 7):
            x = torch.randn(rows, 44, requires_grad=True)
            mine, eager = (torch.autograd.grad(call(x).sin().sum(), x)[0] for call in (compiled, there_and_back))
            assert_close(mine, eager)


def test_a_rule_that_says_other_sizes_than_the_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RuleContext.result

    def of_one_row(call: RuleContext, node: Node, dims: tuple[Dim, ...], *fill: Any) -> PaddedValue:
        value = made(call, node, dims, *fill)
        return replace(value, dims=((Factor(padded_size(dims[0]), 1),), *dims[1:]))

    monkeypatch.setattr(RuleContext, "result", of_one_row)
    before = len(dynaxla.read_metrics().exact_shapes)
    x = torch.randn(6, 5)
    compiled = torch.compile(lambda x: x.cumsum(1) * 2, backend="dynaxla", dynamic=True)
    assert_close(compiled(x), x.cumsum(1) * 2)
    assert "its pad rule gives the sizes [1, " in str(dynaxla.read_metrics().exact_shapes[before:])


def test_only_what_others_made_is_padded_by_a_copy(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    pad, copied = argument_binder.pad, []

    def watched(tensor: Tensor, padded: PaddedShape) -> Tensor:
        made = pad(tensor, padded)
        if made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            copied.append(tuple(tensor.shape))
        return made

    monkeypatch.setattr(argument_binder, "pad", watched)
    pad_small_arguments(monkeypatch)
    net = Attending()
    with recorder.expect(compiles=2):
        check(net, torch.compile(net, backend="dynaxla", dynamic=True, options=BUCKETS))
    # The input, for the forward and for the backward, and the gradient.
    assert copied == [shape for b, n in SIZES for shape in ((b, n, 8), (b, n, 8), (b, 8))]


def test_hooks_see_the_real_elements(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    poison(monkeypatch)
    net = Attending()
    compiled = torch.compile(net, backend="dynaxla", dynamic=True, options=BUCKETS)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.contiguous().clone()

    with saved_tensors_hooks(pack, lambda kept: kept), recorder.expect(compiles=2):
        check(net, compiled)
    assert all(bool(tensor.isfinite().all()) for tensor in seen)


@torch.library.custom_op("dynaxla_tests::double_gradient", mutates_args=())
def double_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return 2 * gradient + 0 * x


@double_gradient.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Doubling(torch.autograd.Function):
    """An eager op in the backward, which reads what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return double_gradient(gradient, x.exp()).view(-1).view(gradient.shape)


class WithEager(Attending):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubling.apply(torch.tanh(x)))


def test_eager_ops_in_the_backward() -> None:
    net = WithEager()
    check(net, torch.compile(net, backend="dynaxla", dynamic=True, options=BUCKETS))
    assert any("double_gradient" in reason for reason in dynaxla.read_metrics().fallbacks)


def test_a_frozen_backward_in_eager(recorder: Recorder) -> None:
    """The forward's bucket is there; the backward was never compiled."""
    net = Attending()
    compiled = torch.compile(net, backend="dynaxla", dynamic=True, options=BUCKETS)
    compiled(torch.randn(5, 9, 8))
    dynaxla.freeze(compiled, on_miss="eager")
    with recorder.expect(compiles=0):
        check(net, compiled)


def test_a_result_that_is_saved_too_has_eagers_strides() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y.transpose(0, 1).sin()

    compiled = torch.compile(f, backend="dynaxla", dynamic=True, options=BUCKETS)
    for sizes in SIZES:
        x, twin = torch.randn(*sizes, 3).requires_grad_(), None
        twin = x.detach().clone().requires_grad_()
        mine, eager = compiled(x), f(twin)
        assert [y.stride() for y in mine] == [y.stride() for y in eager]
        (mine[0].sum() + mine[1].sum()).backward()
        (eager[0].sum() + eager[1].sum()).backward()
        assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_inputs_are_saved_as_the_inputs(dynamic: bool) -> None:
    """A weight's transpose that the forward gave as a result of its own was a copy of each weight at each step."""
    net = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 5))
    table = nn.Parameter(torch.randn(6, 12))
    given = [*net.parameters(), table]
    memory = {each.untyped_storage().data_ptr() for each in given}

    def call(x: Tensor) -> Tensor:
        y = net(x @ table.view(12, 6).t()[:6, 3:9].contiguous())
        return (y * table.unfold(0, 2, 2).permute(2, 0, 1).flatten()[:5] * table.split(5)[1][0, :5]).sum()

    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    compiled, x = torch.compile(call, backend="dynaxla", dynamic=dynamic), torch.randn(7, 6)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(x)
    # 240 and 200 are the weights' numbers of elements; no activation has so many.
    assert [
        each for each in saved if each.numel() in (200, 240) and each.untyped_storage().data_ptr() not in memory
    ] == []
    assert sum(each.untyped_storage().data_ptr() in memory for each in saved) >= 2
    for mine, wanted in zip(torch.autograd.grad(loss, given), torch.autograd.grad(call(x), given), strict=True):
        assert_close(mine, wanted)
