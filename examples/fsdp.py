"""Trains a small transformer with FSDP2 in several processes, each with a device of its own.

    torchrun --nproc-per-node 2 examples/fsdp.py [--compile]

The program is the one for CUDA, but for the device's name and the line `dynaxla.use()`. Rank 0 prints the loss of each step; at
the end the model is saved by torch.distributed.checkpoint and loaded again.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import dynaxla

WORDS, WIDTH, LENGTH = 64, 32, 16


class Model(nn.Module):
    """Predicts the next of some numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    options = parser.parse_args()
    dynaxla.use()
    dist.init_process_group("dynaxla")
    mesh = init_device_mesh("dynaxla", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model().to("dynaxla")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
        if options.compile:
            layer.compile(backend="dynaxla")
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        first = torch.randint(WORDS, (8, 1), device="cpu")
        tokens = ((first + torch.arange(LENGTH + 1)) % WORDS).to("dynaxla")
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder[0])
    dcp.load(state, checkpoint_id=folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
