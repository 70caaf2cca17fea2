"""Small models that train in several processes: on the host by gloo and on the device programs differ in its name alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(device: str) -> Net:
    torch.manual_seed(1)
    return Net().to(device)


def batch(step: int, rank: int, device: str, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(rows, 6, WIDTH, generator=generator), torch.randn(rows, 6, 3, generator=generator)
    return x.to(device), y.to(device)


def use_ddp(net: Net, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(
        net, process_group=mesh.get_group(), gradient_as_bucket_view=True, bucket_cap_mb=0.001
    )


def use_ddp_in_one_bucket(net: Net, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net, process_group=mesh.get_group())


def use_fsdp(net: Net, mesh: DeviceMesh) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def use_fsdp_in_bfloat16(net: Net, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def use_tensor_parallel(net: Net, mesh: DeviceMesh) -> nn.Module:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def use_sequence_parallel(net: Net, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }

    class InPieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.size, self.rank = net, mesh.size(), mesh.get_local_rank()

        def forward(self, x: Tensor) -> Tensor:
            x = x.chunk(self.size, 1)[self.rank]
            for block in self.net.blocks:
                x = block(x)
            whole: Any = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
            return self.net.head(whole.to_local())

    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return InPieces()


class Branches(nn.Module):
    """Uses one of two layers, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.first(x).relu())


def train_branches(device: str, **options: bool) -> dict[str, Any]:
    """Parameters and gradients of steps with DDP in which processes use different layers, or the same with `static_graph`."""
    torch.manual_seed(2)
    net = Branches().to(device)
    model = DistributedDataParallel(net, process_group=mesh_of(device).get_group(), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        branch = 0 if "static_graph" in options else min(step + dist.get_rank(), 3) % 2
        x, y = batch(step, dist.get_rank(), device)
        optimizer.zero_grad()
        (model(x, branch) - y).square().mean().backward()
        optimizer.step()
    gradients = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "weights": {name: whole(p) for name, p in net.named_parameters()}}


def step_fused(device: str) -> dict[str, Tensor]:
    """Sharded parameters after steps of fused optimizers, whose rate is a tensor."""
    mesh, found = mesh_of(device), {}
    for name, make in {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.items():
        torch.manual_seed(6)
        weight = nn.Parameter(distribute_tensor(torch.randn(6, 3).to(device), mesh, [Shard(0)]))
        x = distribute_tensor(torch.randn(4, 6).to(device), mesh, [Replicate()])
        optimizer = make([weight], lr=torch.tensor(0.1), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            (x @ weight).square().sum().backward()
            optimizer.step()
        found[name] = whole(weight)
    return found


Way = Callable[[Net, DeviceMesh], nn.Module]
WAYS: dict[str, Way] = {
    "ddp": use_ddp,
    "ddp_in_one_bucket": use_ddp_in_one_bucket,
    "fsdp": use_fsdp,
    "fsdp_bfloat16": use_fsdp_in_bfloat16,
    "tensor_parallel": use_tensor_parallel,
    "sequence_parallel": use_sequence_parallel,
}
SAME_BATCH = ("tensor_parallel", "sequence_parallel")


def mesh_of(device: str) -> DeviceMesh:
    """A mesh of all processes: on the host with groups of gloo's."""
    if device == "dynaxla":
        return init_device_mesh(device, (dist.get_world_size(),))
    ranks = list(range(dist.get_world_size()))
    return DeviceMesh.from_group(dist.new_group(ranks, backend="gloo"), "cpu")


def whole(value: Any) -> Tensor:
    """A parameter or gradient as all processes have it, on the host."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu().clone()


def train(
    way: str, device: str, compile: Callable[[nn.Module], Any] = lambda net: net, steps: int = STEPS, rows: Any = None
) -> dict[str, Any]:
    """Losses, the first step's gradients and the last parameters of some steps of AdamW."""
    net = build(device)
    model = WAYS[way](net, mesh_of(device))
    step_model = compile(model)
    foreach = False if way in SAME_BATCH else None  # torch takes no mixture of DTensors and others at once
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    rank = 0 if way in SAME_BATCH else dist.get_rank()
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(steps):
        x, y = batch(step, rank, device, 4 if rows is None else rows[step])
        optimizer.zero_grad()
        loss = (step_model(x) - y).square().mean()
        loss.backward()
        if not step:
            first = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": first, "weights": {n: whole(p) for n, p in net.named_parameters()}}


def use_tensors(device: str) -> dict[str, Any]:
    """DTensors of a mesh: placements, redistributions, ops, gradients."""
    mesh = mesh_of(device)
    torch.manual_seed(3)
    x, w = torch.randn(6, 5).to(device), torch.randn(5, 4).to(device)
    a = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    b = distribute_tensor(w, mesh, [Shard(1)]).requires_grad_()
    product = a @ b
    loss = product.relu().sum()
    loss.backward()
    found = {
        "product": product,
        "loss": loss,
        "a": a.grad,
        "b": b.grad,
        "columns": a.redistribute(placements=[Shard(1)]),
        "mean": a.mean(0),
        "softmax": b.softmax(1),
    }
    return {name: whole(value) for name, value in found.items()}
