"""All memories of the process: found while they live, forgotten soon after."""

from __future__ import annotations

import pytest
import torch

from dynaxla.device.storage import FEW_LIVE, DeviceStorage, DeviceStorages
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.types import TensorSpec

SPEC = TensorSpec((2, 3), torch.float32)


def test_the_dead_are_forgotten_and_the_living_found(device: torch.device) -> None:
    memories = DeviceStorages()
    kept = [memories.tensor(DeviceStorage(SPEC)) for _ in range(10)]
    for _ in range(3 * FEW_LIVE):
        memories.tensor(DeviceStorage(SPEC))
    assert len(memories) == 10
    assert {id(memory) for memory in memories} == {id(get_attached_memory(tensor.untyped_storage())) for tensor in kept}
    assert all(memories.of(tensor) is get_attached_memory(tensor.untyped_storage()) for tensor in kept)
    assert len(memories._live._refs) <= FEW_LIVE + 1


def test_more_that_live_than_are_looked_through(device: torch.device) -> None:
    memories = DeviceStorages()
    kept = [memories.tensor(DeviceStorage(SPEC)) for _ in range(FEW_LIVE + 100)]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert len(memories) == len(kept) == len(addresses)
    assert all(memories._live.get(tensor.untyped_storage().data_ptr()) is not None for tensor in kept)


def test_tensors_without_elements_have_eagers_strides(device: torch.device) -> None:
    for sizes in ((0,), (2, 0, 3), (3, 1, 0, 2)):
        made = DeviceStorages().tensor(DeviceStorage(TensorSpec(sizes, torch.float32)))
        assert made.stride() == torch.empty(sizes).stride()


def test_a_slice_of_a_storage_is_a_part_of_it(device: torch.device) -> None:
    """torch makes it by adding to the storage's address, which points to no memory here."""
    x = torch.arange(4, device=device)
    storage = x.untyped_storage()
    assert storage[8] == 1
    part = storage[8:24]
    assert part.nbytes() == 16
    assert part.tolist() == [1, *[0] * 7, 2, *[0] * 7]
    seen = torch.empty(0, dtype=torch.int64, device=device).set_(part, 1, (1,), (1,))
    part[9] = 1
    assert (x.tolist(), seen.tolist()) == ([0, 1, 258, 3], [258]) == (x.cpu().tolist(), seen.cpu().tolist())
    seen.add_(1)
    assert x.tolist() == [0, 1, 259, 3]
    del x, storage
    assert part.tolist()[:9] == [1, *[0] * 7, 3]
    with pytest.raises(BufferError, match="multiple of 8 bytes"):
        torch.empty(0, dtype=torch.int64, device=device).set_(part[1:9])
    with pytest.raises(RuntimeError, match="not resizable"):
        part.resize_(4)


def test_a_storage_of_bytes(device: torch.device) -> None:
    assert torch.UntypedStorage([3, 4, 255], device=device).tolist() == [3, 4, 255]
