"""Batch norms in checkpoints, whose running statistics the forward writes to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

BLOCKS = {
    "norm": (nn.BatchNorm1d(4), (5, 4)),
    "images": (
        nn.Sequential(
            *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.BatchNorm2d(4),
        ),
        (2, 3, 8, 8),
    ),
    "instances": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 6)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_batch_norm_is_computed_again(name: str, reentrant: bool, recorder: Recorder) -> None:
    """The running statistics are those of one forward; eager's checkpoint computes them twice."""
    block, shape = BLOCKS[name]
    found = []
    for compiled in (False, True):
        net, plain = copy.deepcopy(block), copy.deepcopy(block)

        def run(x: Tensor, net: nn.Module = net) -> Tensor:
            return checkpoint(net, x, use_reentrant=reentrant).sin()  # type: ignore[no-any-return]

        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        plain(x.detach())
        with recorder.expect(eager_ops=0):
            (torch.compile(run, backend="dynaxla") if compiled else run)(x).pow(3).sum().backward()
        statistics = dict((net if compiled else plain).named_buffers())
        found.append([x.grad, *(parameter.grad for parameter in net.parameters()), *statistics.values()])
    for mine, eagers in zip(found[1], found[0], strict=True):
        assert_close(mine, eagers)
