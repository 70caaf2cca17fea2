"""Meshes over the devices of two processes: what they compute is what one process with all devices computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

import dynaxla
from dynaxla.errors import DistributedError, ShardingError
from tests.distributed import mesh_training
from tests.distributed.children import save
from tests.tolerances import assert_close

ROOT = Path(__file__).parents[2]
CLOSE, AFTER_STEPS = 1e-5, 1e-3
"""Of outputs and gradients, and of what steps of AdamW gave: relative to the largest number of a tensor."""

_ALONE = """
import sys, pathlib, torch, dynaxla
from tests.distributed import mesh_training
dynaxla.use("cpu", devices=4)
folder = pathlib.Path(sys.argv[1])
found = mesh_training.train_from_start((2, 2), folder / "alone")
found["again"] = mesh_training.train_from_checkpoint((1, 4), folder / "checkpoint")
torch.save(found, folder / "found.pt")
"""


def assert_alike(got: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    scale = max(expected.abs().max().item(), 1e-3)
    assert (got - expected).abs().max().item() <= tolerance * scale, name


def test_training_is_that_of_one_process(tmp_path: Path) -> None:
    """Outputs, gradients, steps of AdamW; a checkpoint that goes on, and that goes on by one process on another mesh."""
    dynaxla.launch(mesh_training.check_rank, (str(tmp_path), (2, 2)), nprocs=2, devices=2)
    subprocess.run([sys.executable, "-c", _ALONE, str(tmp_path)], check=True, cwd=ROOT, env=dict(os.environ))
    expected = torch.load(tmp_path / "found.pt")
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert got["specs"] == expected["specs"]
        assert_alike(got["outputs"], expected["outputs"], CLOSE, "outputs")
        for name, gradient in expected["gradients"].items():
            assert_alike(got["gradients"][name], gradient, CLOSE, name)
        for name, value in expected["state"].items():
            assert_alike(got["state"][name], value, AFTER_STEPS, name)
        for losses in ("losses", "later"):
            assert_alike(torch.tensor(got[losses]), torch.tensor(expected[losses]), AFTER_STEPS, losses)
        again, elements = got["again"]
        assert again == got["later"], "a checkpoint goes on as if nothing had been"
        assert elements == _own_elements(), "each process reads what its devices need, once"
        assert_alike(torch.tensor(expected["again"][0]), torch.tensor(got["later"]), AFTER_STEPS, "on another mesh")
    assert_written_once(tmp_path / "checkpoint")


def _own_elements() -> int:
    """Of parameters and both moments those that one of two processes has, which split dims over "data", and the numbers of
    steps."""
    parameters = list(mesh_training.build().parameters())
    return sum(3 * parameter.numel() // 2 + 1 for parameter in parameters)


def assert_written_once(folder: Path) -> None:
    """Each element is in one file, and the two processes' files have as much."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    written: Counter[str] = Counter()
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            sizes = {chunk.offsets: chunk.sizes.numel() for chunk in value.chunks}
            assert sum(sizes.values()) == value.size.numel(), name
            for offsets, size in sizes.items():
                written[metadata.storage_data[MetadataIndex(name, offsets)].relative_path] += size
    first, second = written.values()
    assert abs(first - second) < 0.1 * (first + second), written


def check_tensors(rank: int, folder: str) -> None:
    count, index = dynaxla.distributed.process_count(), dynaxla.distributed.process_index()
    assert (count, index) == (2, rank)
    mesh = dynaxla.make_mesh((2, 2), ("data", "model"))
    x, w = torch.arange(32.0).reshape(8, 4), torch.arange(24.0).reshape(4, 6) / 10
    split, other = dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w, mesh, (None, "model"))
    assert torch.equal(split.cpu(), x), "gathered"
    assert_close((split @ other).cpu(), x @ w)
    total = split.sum()
    if rank == 0:  # every device has it: no other process is needed
        assert total.item() == x.sum().item()
    check_places(split, other, x, w)
    check_rows(mesh, x, rank)
    check_own_mesh(x, rank)
    dynaxla.distributed.save({"x": split}, Path(folder) / "whole.pt")
    assert torch.equal(torch.load(Path(folder) / "whole.pt")["x"], x)
    save(folder, [split.cpu(), dynaxla.sharding(split)])


def check_places(split: Tensor, other: Tensor, x: Tensor, w: Tensor) -> None:
    """What is written stays where it is, and another sharding has the same values."""
    mesh = dynaxla.sharding(split).mesh  # type: ignore[union-attr]
    split.mul_(2).copy_(x)
    other[:, 1:3] = 0
    w = w.clone()
    w[:, 1:3] = 0
    assert torch.equal(other.cpu(), w)
    assert dynaxla.sharding(split).spec == ("data", None)  # type: ignore[union-attr]
    dynaxla.shard(split, mesh, (None, "model"))
    assert torch.equal(split.cpu(), x)
    dynaxla.shard(split, mesh, (("data", "model"),))
    assert torch.equal(split.cpu(), x)
    assert torch.equal((torch.zeros_like(split) + split.exp().log().round()).cpu(), x)
    scaled = torch.compile(lambda y, by: (y * by).softmax(1), backend="dynaxla", dynamic=True)
    for rows in (8, 4):
        part = dynaxla.shard(x[:rows].clone(), mesh, ("data",))
        assert_close(scaled(part, 0.5).cpu(), (x[:rows] * 0.5).softmax(1))


def check_rows(mesh: dynaxla.Mesh, x: Tensor, rank: int) -> None:
    """Each process loads the rows of its devices; where they are the same, both load the same."""
    batches = [{"x": x.chunk(2)[rank], "scale": torch.tensor(2.0)}]
    for batch in dynaxla.DeviceLoader(batches, mesh=mesh):
        assert batch["x"].shape == x.shape
        assert torch.equal((batch["x"] * batch["scale"]).cpu(), 2 * x)
    for y in dynaxla.DeviceLoader([x], mesh=mesh, axis="model"):
        assert torch.equal(y.cpu(), x)
        assert dynaxla.sharding(y).spec == ("model", None)  # type: ignore[union-attr]
    with pytest.raises(ShardingError, match="do not divide"):
        list(dynaxla.DeviceLoader([x[:3]], mesh=mesh, axis=("data", "model")))


def check_own_mesh(x: Tensor, rank: int) -> None:
    """A mesh of a process's own devices, on which each computes by itself."""
    own = dynaxla.make_mesh((2,), ("model",), local=True)
    mine = dynaxla.shard(x * (rank + 1), own, ("model",))
    for _ in range(1 + rank):
        assert_close(mine.softmax(1).cpu(), (x * (rank + 1)).softmax(1))
    if rank == 1:
        with pytest.raises(ShardingError, match="no device of process 1"):
            dynaxla.make_mesh((2,), ("model",))
    with pytest.raises(ShardingError, match="has 8 devices, and there are 4"):
        dynaxla.make_mesh((8,), ("model",))
    with pytest.raises(DistributedError, match="before the processes met"):
        dynaxla.distributed.initialize("localhost:1", 2, rank)


def test_tensors_of_two_processes(tmp_path: Path) -> None:
    dynaxla.launch(check_tensors, (str(tmp_path),), nprocs=2, devices=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_job_needs_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistributedError, match="give all three"):
        dynaxla.distributed.initialize("localhost:1234", 2)
    with pytest.raises(DistributedError, match="no process 2 of 2"):
        dynaxla.distributed.initialize("localhost:1234", 2, 2)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DistributedError, match="no job is found"):
        dynaxla.distributed.initialize()
    assert (dynaxla.distributed.process_index(), dynaxla.distributed.process_count()) == (0, 1)
