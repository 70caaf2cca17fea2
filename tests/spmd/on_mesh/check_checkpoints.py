"""`torch.distributed.checkpoint` of tensors over a mesh, in one process: who is written once, and what another mesh reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dynaxla
from dynaxla.errors import ShardingError
from dynaxla.mesh import Mesh
from tests.spmd.on_mesh.check_tensors import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class CountingReader(dcp.FileSystemReader):
    """Counts the elements that are read, and the shards in the checkpoint that they are parts of."""

    elements = 0
    shards = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted = [item for item in plan.items if item.type.name == "TENSOR"]
        self.elements = sum(math.prod(item.lengths) for item in wanted)
        self.shards = len({item.storage_index for item in wanted})
        return super().read_data(plan, planner)


def list_chunks(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """By the names of a checkpoint's tensors, where their shards begin."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = metadata.state_dict_metadata.items()
    return {name: [tuple(chunk.offsets) for chunk in value.chunks] for name, value in found if hasattr(value, "chunks")}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last), nn.LayerNorm(16))  # type: ignore[call-overload]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_on_another_mesh(mesh: Mesh, tmp_path: Path) -> None:
    """A model and its optimizer: each shard is written once, another mesh reads each element once, and training goes on."""
    model = dynaxla.shard(build(), mesh, {"0.weight": ("model", "data"), "1.weight": ("data", "model")})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "step": 1}, checkpoint_id=tmp_path)
    chunks = list_chunks(tmp_path)
    assert sorted(chunks["model.0.weight"]) == [(row, column) for row in (0, 8, 16, 24) for column in (0, 8)]
    assert sorted(chunks["optimizer.state.1.weight.exp_avg"]) == [(a, b, 0, 0) for a in (0, 4) for b in (0, 2, 4, 6)]
    assert chunks["model.2.weight"] == [(0,)], "what every device has is written once"

    again = build()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(7)
    other = dynaxla.make_mesh((4, 2), ("a", "b"))
    dynaxla.shard(again, other, {"0.weight": (None, ("b", "a")), "1.weight": ("a",), "2.weight": ("b",)})
    its = torch.optim.AdamW(again.parameters(), 1e-2)
    states = get_state_dict(again, its)
    specs = [spec_of(parameter) for parameter in again.parameters()]
    read: dict[str, Any] = {"model": states[0], "optimizer": states[1], "step": 0}
    reader = CountingReader(tmp_path)
    versions = [parameter._version for parameter in states[0].values()]
    dcp.load(read, storage_reader=reader)
    assert reader.elements == 3 * sum(parameter.numel() for parameter in again.parameters()) + len(specs)  # and "step"s
    assert [parameter._version for parameter in states[0].values()] > versions
    set_state_dict(again, its, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert read["step"] == 1
    train(model, optimizer)
    train(again, its)
    assert [spec_of(parameter) for parameter in again.parameters()] == specs
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
        assert spec_of(its.state[ours]["exp_avg"]) == spec_of(ours)
        assert torch.equal(its.state[ours]["exp_avg_sq"].cpu(), optimizer.state[theirs]["exp_avg_sq"].cpu())


def test_a_mesh_reads_only_the_shards_that_it_needs(mesh: Mesh, tmp_path: Path) -> None:
    """Of a checkpoint of the host's tensors, and back."""
    host = {"x": torch.randn(8, 16), "y": torch.arange(6)}
    dcp.save(host, checkpoint_id=tmp_path / "host")
    made = {"x": dynaxla.shard(torch.zeros(8, 16), mesh, (None, "model"))}
    reader = CountingReader(tmp_path / "host")
    dcp.load(made, storage_reader=reader)
    assert (reader.elements, reader.shards) == (8 * 16, 1)
    assert torch.equal(made["x"].cpu(), host["x"])
    assert spec_of(made["x"]) == (None, "model")
    dcp.save(made, checkpoint_id=tmp_path / "mesh")
    back = {"x": torch.zeros(8, 16)}
    dcp.load(back, checkpoint_id=tmp_path / "mesh")
    assert torch.equal(back["x"], host["x"])


def test_what_was_not_read_is_as_before(mesh: Mesh, tmp_path: Path) -> None:
    """A load that fails changes nothing, and the next save writes what is there."""
    host = torch.randn(8, 16)
    state = {"x": dynaxla.shard(host, mesh, ("data",)), "z": dynaxla.shard(host, mesh, ("model",))}
    dcp.save({**state, "z": host[:4]}, checkpoint_id=tmp_path / "small")
    with pytest.raises(BaseException, match="Size mismatch"):
        dcp.load(state, checkpoint_id=tmp_path / "small")
    dcp.save(state, checkpoint_id=tmp_path / "whole")
    back = {name: torch.zeros(8, 16) for name in state}
    dcp.load(back, checkpoint_id=tmp_path / "whole")
    for value in back.values():
        assert torch.equal(value, host)


def test_a_part_of_a_tensor_has_no_checkpoint(mesh: Mesh, tmp_path: Path) -> None:
    made = dynaxla.shard(torch.randn(8, 16), mesh, ("data",))
    with pytest.raises((ShardingError, dcp.CheckpointException), match="a view of a part of a tensor"):
        dcp.save({"x": made[2:4]}, checkpoint_id=tmp_path)


def test_other_tensors_offer_no_shards(mesh: Mesh) -> None:
    names = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    plain: tuple[Tensor, ...] = (torch.zeros(2), torch.zeros(2, device="dynaxla"), torch.zeros(2, device="meta"))
    assert not any(hasattr(tensor, name) for tensor in plain for name in names)
    assert all(hasattr(dynaxla.shard(torch.zeros(8), mesh, ("data",)), name) for name in names)
