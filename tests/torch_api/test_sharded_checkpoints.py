"""What the wall relies on of `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dynaxla.torch_api.sharded_checkpoints import NotedTensor, offer_shards
from tests.torch_api.boundary import boundary


class Halves:
    """Float tensors are in two shards, one below the other."""

    def __init__(self) -> None:
        self.copied = 0
        self.calls = list[str]()

    def is_sharded(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() == 2

    def list_shards(self, tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        rows, columns = tensor.shape
        return [((start, 0), (rows // 2, columns)) for start in (0, rows // 2)]

    def begin_write(self, tensor: Tensor) -> None:
        self.calls.append("write")

    def begin_read(self, tensor: Tensor) -> None:
        self.calls.append("read")

    def open_shard(self, tensor: Tensor, offsets: tuple[int, ...]) -> Tensor:
        half = tensor[offsets[0] : offsets[0] + len(tensor) // 2]
        return NotedTensor.of(half, self._note) if "read" in self.calls else half

    def _note(self, count: int) -> None:
        self.copied += count


@boundary(
    "sharded_checkpoints.offer_shards",
    "sharded_checkpoints.ShardedTensors",
    "sharded_checkpoints.NotedTensor",
    "sharded_checkpoints.Offsets",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_planners_ask_plain_tensors_for_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        monkeypatch.setattr(torch.Tensor, name, None, raising=False)  # so that it is taken away at the end
    halves = Halves()
    offer_shards(halves)
    x, y = torch.randn(4, 3), torch.arange(4)
    dcp.save({"x": x, "y": y}, checkpoint_id=tmp_path)
    chunks = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert [tuple(chunk.offsets) for chunk in chunks["x"].chunks] == [(0, 0), (2, 0)]
    assert [tuple(chunk.offsets) for chunk in chunks["y"].chunks] == [(0,)]
    made = {"x": torch.zeros(4, 3), "y": torch.zeros(4, dtype=torch.int64)}
    dcp.load(made, checkpoint_id=tmp_path)
    assert torch.equal(made["x"], x)
    assert torch.equal(made["y"], y)
    assert halves.calls == ["write", "read"]
    assert halves.copied == x.numel()
    assert torch.overrides.get_overridable_functions()
