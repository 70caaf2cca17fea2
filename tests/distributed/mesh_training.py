"""A small decoder that trains over a mesh of two axes: by one process of all devices, and by several processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dynaxla
from dynaxla.mesh import Mesh
from tests.distributed.children import save

ROWS, LENGTH, STEPS, VOCABULARY, WIDTH, HEADS = 8, 6, 3, 32, 16, 4


class Decoder(nn.Module):
    """A block as Llama's: [batch, length] tokens -> [batch, length, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.before, self.between, self.last = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        y = self.before(x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = (q @ k.mT * 0.5 + torch.full((LENGTH, LENGTH), -1e9, device=x.device).triu(1)).softmax(-1)
        x = x + F.dropout(self.out((scores @ v).transpose(1, 2).flatten(-2)), 0.1)
        y = self.between(x)
        return self.head(self.last(x + self.down(F.silu(self.gate(y)) * self.up(y))))


PLAN = {
    r"(q|k|v|gate|up|head)\.weight": ("model", None),
    r"(out|down|tokens)\.weight": (None, "model"),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


def batches() -> list[Tensor]:
    """Of all processes: tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2 * STEPS)]


def place(model: nn.Module, shape: tuple[int, int]) -> Mesh:
    """Split over "model", and fully sharded over "data"."""
    mesh = dynaxla.make_mesh(shape, ("data", "model"))
    dynaxla.shard(model, mesh, PLAN)
    return dynaxla.fully_shard(model, mesh, "data") and mesh


def own_rows(batch: Tensor, mesh: Mesh) -> Tensor:
    """The rows that this process loads, of a mesh whose first axis the processes split."""
    count = dynaxla.distributed.process_count()
    return batch.chunk(count)[dynaxla.distributed.process_index()] if count > 1 else batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, data: list[Tensor]) -> dict[str, Any]:
    """What some steps gave, on the host."""
    run = torch.compile(lambda x: model(x).flatten(0, 1), backend="dynaxla", options={"fallback": "error"})
    found: dict[str, Any] = {"losses": []}
    torch.manual_seed(3)
    for x in dynaxla.DeviceLoader([own_rows(each, mesh) for each in data], mesh=mesh):
        outputs = run(x)
        loss = F.cross_entropy(outputs, x.roll(-1, 1).flatten())
        loss.backward()
        if "outputs" not in found:
            found["outputs"] = outputs.detach().cpu()
            found["gradients"] = {name: value.grad.cpu().clone() for name, value in model.named_parameters()}
            found["specs"] = [dynaxla.sharding(each).spec for each in (outputs, loss)]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    found["state"] = {name: value.cpu() for name, value in model.state_dict().items()}
    return found


def train_from_start(shape: tuple[int, int], checkpoint: Path) -> dict[str, Any]:
    """Some steps, a checkpoint, and the losses of some more."""
    model = build()
    mesh = place(model, shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, fused=True)
    found = train(model, optimizer, mesh, batches()[:STEPS])
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint)
    found["later"] = train(model, optimizer, mesh, batches()[STEPS:])["losses"]
    return found


class CountingReader(dcp.FileSystemReader):
    """Counts the elements that this process reads."""

    elements = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.elements = sum(math.prod(item.lengths) for item in plan.items if item.type.name == "TENSOR")
        return super().read_data(plan, planner)


def train_from_checkpoint(shape: tuple[int, int], checkpoint: Path) -> tuple[list[float], int]:
    """The losses of the steps after a checkpoint, and how many elements of it this process read."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    mesh = place(model, shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, fused=True)
    states, reader = get_state_dict(model, optimizer), CountingReader(checkpoint)
    read: dict[str, Any] = {"model": states[0], "optimizer": states[1]}
    dcp.load(read, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    return train(model, optimizer, mesh, batches()[STEPS:])["losses"], reader.elements


def check_rank(rank: int, folder: str, shape: tuple[int, int]) -> None:
    """What one of several processes does."""
    found = train_from_start(shape, Path(folder) / "checkpoint")
    found["again"] = train_from_checkpoint(shape, Path(folder) / "checkpoint")
    save(folder, found)
