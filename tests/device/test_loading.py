"""Batches that come to the device ahead of their use."""

from __future__ import annotations

import gc
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.errors import OptionError

Pair = namedtuple("Pair", "x y")


def loaders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "dynaxla-loader"}


def ended() -> bool:
    until = time.monotonic() + 20
    while loaders() and time.monotonic() < until:
        time.sleep(0.01)
    return not loaders()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_loaders_own_and_on_the_device(workers: int) -> None:
    x, y = torch.randn(22, 3), torch.arange(22)
    own = DataLoader(
        TensorDataset(x, y), batch_size=4, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    loader = dynaxla.DeviceLoader(own)
    assert len(loader) == 6
    assert loader.batch_size == 4
    for _ in range(2):
        found = list(loader)
        assert {each.device.type for batch in found for each in batch} == {"dynaxla"}
        assert torch.equal(torch.cat([batch[0].cpu() for batch in found]), x)
        assert torch.equal(torch.cat([batch[1].cpu() for batch in found]), y)
    assert ended()


def test_what_a_batch_is_made_of_is_kept() -> None:
    given: list[Any] = [
        {"x": torch.ones(2), "name": "a"},
        Pair(torch.zeros(1), [torch.ones(1), 3]),
        torch.tensor(5),
        "text",
    ]
    first, second, third, fourth = dynaxla.DeviceLoader(given, ahead=1)
    assert first["x"].device.type == "dynaxla"
    assert first["name"] == "a"
    assert isinstance(second, Pair)
    assert second.y[0].device.type == "dynaxla"
    assert second.y[1] == 3
    assert (third.item(), fourth) == (5, "text")


def test_it_runs_ahead_by_so_many() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[torch.Tensor]:
        for number in range(20):
            taken.append(number)
            yield torch.tensor(number)

    iterator = iter(dynaxla.DeviceLoader(numbers(), ahead=3))
    assert next(iterator).item() == 0
    until = time.monotonic() + 20
    while len(taken) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(taken) == 5  # one given, three ready, one that waits for its place
    assert [each.item() for each in iterator] == list(range(1, 20))
    assert ended()


def test_an_error_is_the_readers_and_a_left_iteration_ends() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.tensor(1)
        raise ValueError("a broken file")

    iterator = iter(dynaxla.DeviceLoader(broken()))
    assert next(iterator).item() == 1
    with pytest.raises(ValueError, match="a broken file"):
        next(iterator)
    for batch in dynaxla.DeviceLoader([torch.ones(1000)] * 100):
        assert batch.sum().item() == 1000
        break
    del batch
    gc.collect()
    assert ended()
    held = len(device_in_use().memories)
    list(dynaxla.DeviceLoader([torch.ones(10)] * 5))
    assert ended()
    gc.collect()
    assert len(device_in_use().memories) == held
    with pytest.raises(OptionError, match="ahead=0"):
        dynaxla.DeviceLoader([], ahead=0)
    with pytest.raises(OptionError, match="the device is not named here"):
        dynaxla.DeviceLoader([], "dynaxla")  # type: ignore[arg-type]  # as PyTorch/XLA's
    assert list(dynaxla.DeviceLoader([])) == []
