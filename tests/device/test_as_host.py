"""Compiled graphs of the device have the sizes and strides of the host's, also where torch's kernels differ by device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.tolerances import assert_close

DEVICE = "dynaxla"
BAGS = [("sum", {}), ("sum", {"padding_idx": 1}), ("mean", {"include_last_offset": True}), ("max", {})]


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("mode", "settings"), quick(BAGS, BAGS[0]))
def test_bags_of_embeddings(mode: str, settings: dict[str, int], recorder: Recorder) -> None:
    torch.manual_seed(0)
    net = nn.EmbeddingBag(9, 4, mode=mode, **settings)
    mine, rows, starts = copy.deepcopy(net).to(DEVICE), torch.randint(0, 9, (7,)), torch.tensor([0, 2, 7])
    before = recorder.snapshot().host_ops
    with recorder.expect(eager_ops=0):
        result = torch.compile(mine, backend="dynaxla")(rows.to(DEVICE), starts.to(DEVICE))
        result.square().sum().backward()
    assert recorder.snapshot().host_ops == before
    expected = net(rows, starts)
    expected.square().sum().backward()
    assert_close(result.cpu(), expected)
    assert_close(mine.weight.grad.cpu(), net.weight.grad)


def frozen(norm: nn.Module) -> nn.Module:
    return norm.eval()


NORMS = [
    (nn.LayerNorm(5), torch.bfloat16),
    (nn.GroupNorm(2, 6), torch.float16),
    (nn.BatchNorm1d(6), torch.bfloat16),
    (frozen(nn.BatchNorm1d(6)), torch.float32),
    (frozen(nn.BatchNorm1d(6)), torch.float16),
    (nn.InstanceNorm1d(6, affine=True), torch.bfloat16),
]


@pytest.mark.parametrize(("norm", "dtype"), quick(NORMS, NORMS[0], NORMS[3]))
@pytest.mark.parametrize("dynamic", quick([False, True], False))
def test_statistics_of_norms(norm: nn.Module, dtype: torch.dtype, dynamic: bool, recorder: Recorder) -> None:
    """CUDA's are float32 where the host's are as narrow as what is normalized, and of frozen ones they have another size."""
    torch.manual_seed(0)
    net, x, weights = copy.deepcopy(norm).to(dtype), torch.randn(4, 6, 5, dtype=dtype), torch.randn(4, 6, 5)
    mine = copy.deepcopy(net).to(DEVICE)
    before = recorder.snapshot().host_ops
    with recorder.expect(eager_ops=0):
        result = torch.compile(mine, backend="dynaxla", dynamic=dynamic)(x.to(DEVICE))
        (result.float() * weights.to(DEVICE)).sum().backward()
    assert recorder.snapshot().host_ops == before
    expected = net(x)
    (expected.float() * weights).sum().backward()
    assert_close(result.cpu(), expected)
    for own, its in zip(mine.parameters(), net.parameters(), strict=True):
        assert_close(own.grad.cpu(), its.grad)
    for own, its in zip(mine.buffers(), net.buffers(), strict=True):
        assert_close(own.cpu(), its)


@torch.no_grad()
def test_strides() -> None:
    x = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    there = x.to(DEVICE)
    expected = torch.pixel_shuffle(x, 2)
    for run in (torch.pixel_shuffle, torch.compile(lambda x, by: torch.pixel_shuffle(x, by), backend="dynaxla")):
        assert run(there, 2).stride() == expected.stride()
        assert_close(run(there, 2).cpu(), expected)


@pytest.mark.faulty
def test_a_gradient_of_what_a_mask_writes() -> None:
    """AOTAutograd meets an op in the backward pass that has no sizes beforehand: the graph is eager's, as on the host."""

    def written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[mask] = x[0, 0]
        return y

    x, mask = torch.randn(3, 5, 2), torch.rand(3, 5) > 0.5
    mine, its = x.to(DEVICE).requires_grad_(), x.clone().requires_grad_()
    torch.compile(written, backend="dynaxla")(mine, mask.to(DEVICE)).square().sum().backward()
    written(its, mask).square().sum().backward()
    assert_close(mine.grad.cpu(), its.grad)
