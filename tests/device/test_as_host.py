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
    with recorder.expect(eager_ops=0, host_ops={}):
        result = torch.compile(mine, backend="dynaxla")(rows.to(DEVICE), starts.to(DEVICE))
        result.square().sum().backward()
    expected = net(rows, starts)
    expected.square().sum().backward()
    assert_close(result.cpu(), expected)
    assert_close(mine.weight.grad.cpu(), net.weight.grad)


@torch.no_grad()
def test_strides() -> None:
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    expected = torch.pixel_shuffle(x, 2)
    result = torch.compile(lambda x: torch.pixel_shuffle(x, 2), backend="dynaxla")(x.to(DEVICE))
    assert result.stride() == expected.stride()
    assert_close(result.cpu(), expected)


def test_a_gradient_of_what_a_mask_writes() -> None:
    """AOTAutograd meets an op in the backward pass that has no sizes beforehand."""

    def written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[mask] = x[0, 0]
        return y

    x, mask = torch.randn(3, 5, 2), torch.rand(3, 5) > 0.5
    mine, its = x.to(DEVICE).requires_grad_(), x.clone().requires_grad_()
    torch.compile(written, backend="dynaxla")(mine, mask.to(DEVICE)).square().sum().backward()
    written(its, mask).square().sum().backward()
    assert_close(mine.grad.cpu(), its.grad)
