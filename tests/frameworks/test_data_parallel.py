"""Data parallel training over gloo: two processes on this machine, gradients of one process with all the data."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynaxla
from tests.lists import quick
from tests.tolerances import assert_close

RANKS = 2
WIDTH = 512  # a layer is the megabyte of the smallest bucket


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def build() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def batches() -> list[Tensor]:
    """The last is smaller, so that its size becomes one that varies."""
    torch.manual_seed(2)
    return [torch.randn(size, WIDTH) for size in (8, 6)]


def wrap_net(net: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(net, bucket_cap_mb=1), backend="dynaxla")


def inside(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(torch.compile(net, backend="dynaxla"))


def _train(rank: int, port: int, wrap: Callable[[nn.Module], nn.Module], folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=RANKS, timeout=timedelta(seconds=240))
    try:
        net = build()
        wrapped = wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        gradients, graphs = [], []
        for batch in batches():
            optimizer.zero_grad()
            wrapped(batch.chunk(RANKS)[rank]).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None])
            optimizer.step()
            graphs.append(len(dynaxla.read_metrics().captured))
        found = {"gradients": gradients, "graphs": graphs, "eager": dynaxla.read_metrics().fallbacks}
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def _expected() -> list[list[Tensor]]:
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    gradients = []
    for batch in batches():
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None])
        optimizer.step()
    return gradients


@pytest.mark.long
@pytest.mark.parametrize("wrap", quick([wrap_net, inside], wrap_net))
def test_gradients(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Dynamo cuts the graph at the buckets of gradients (its DDPOptimizer)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(_train, (port, wrap, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["eager"] == ()
        assert found["graphs"][0] > 1
        for ours, wanted in zip(found["gradients"], _expected(), strict=True):
            for one, other in zip(ours, wanted, strict=True):
                assert_close(one, other)
