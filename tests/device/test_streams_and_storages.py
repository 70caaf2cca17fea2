"""What FSDP2 asks of a device: storages that are freed for a while, streams and events, copies into views of one tensor."""

from __future__ import annotations

import pytest
import torch

import dynaxla


def test_a_storage_is_freed_and_filled_again() -> None:
    x = torch.arange(6.0, device="dynaxla")
    view, before = x.view(2, 3), torch.dynaxla.memory_allocated()
    x.untyped_storage().resize_(0)
    assert view.untyped_storage().size() == 0
    assert torch.dynaxla.memory_allocated() == before - 24
    view.untyped_storage().resize_(24)
    assert x.untyped_storage().nbytes() == 24
    x.copy_(torch.ones(6))
    assert view.tolist() == [[1.0] * 3] * 2


def test_a_storage_grows_and_shrinks_with_what_it_has() -> None:
    x = torch.arange(4.0, device="dynaxla")
    storage = x.untyped_storage()
    assert storage.resize_(32) is storage
    grown = torch.empty(0, device="dynaxla").set_(storage, 0, (8,), (1,))
    assert grown[:4].tolist() == x.tolist() == [0.0, 1.0, 2.0, 3.0]
    grown[6] = 5
    assert grown[6].item() == 5
    storage.resize_(8)
    assert torch.empty(0, device="dynaxla").set_(storage, 0, (2,), (1,)).tolist() == [0.0, 1.0]


def test_events_are_moments_of_the_one_stream() -> None:
    module = torch.dynaxla
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    stream = module.Stream(priority=-1)
    assert stream is module.current_stream()
    with module.stream(stream):
        first.record()
        (torch.ones(8, device="dynaxla") * 2).sum()
        assert stream.record_event(last) is last
    stream.wait_event(last)
    torch.accelerator.current_stream().wait_event(last)  # as FSDP2's backward calls it
    stream.wait_stream(module.current_stream())
    assert first.elapsed_time(last) >= 0
    assert last.query()
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(module.Event().record())


def test_copies_into_views_of_one_tensor_stay_on_the_device() -> None:
    flat, before = torch.zeros(6, device="dynaxla"), dynaxla.read_metrics().host_ops
    version = flat._version
    torch._foreach_copy_(
        list(flat.split([2, 4])), [torch.ones(2, device="dynaxla"), torch.arange(4.0, device="dynaxla")]
    )
    assert flat.tolist() == [1, 1, 0, 1, 2, 3]
    assert flat._version > version
    wide, narrow = torch.zeros(2, 4, device="dynaxla"), torch.ones(4, 2, dtype=torch.bfloat16, device="dynaxla")
    torch._chunk_cat([narrow], 0, 2, out=wide)
    assert wide.tolist() == torch._chunk_cat([narrow.cpu()], 0, 2).float().tolist()
    assert dynaxla.read_metrics().host_ops == before
