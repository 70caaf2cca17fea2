"""A number in a tensor of no dims that is written as a plain one: eager raises where the dtype does not hold it."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from dynaxla.device.registration import device_in_use

D = "dynaxla"
NUMBERS = (300, -3, -300, 65504, 100_000, 10**12, 2.5, 1e5, 1e300, math.inf, -math.inf, math.nan, True)
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.float32, torch.bool)


def _write(way: str, dtype: torch.dtype, number: float, device: str) -> Tensor:
    x, value = torch.ones(3, dtype=dtype, device=device), torch.tensor(number, device=device)
    if way == "index_fill_":
        return x.index_fill_(0, torch.tensor([1], device=device), value)
    mask = torch.tensor([True, False, True], device=device)
    return x.masked_fill(mask, value) if way == "masked_fill" else x.masked_fill_(mask, value)


def _outcome(way: str, dtype: torch.dtype, number: float, device: str) -> Tensor | str:
    """What a call gives, on the host, or the words of its error, which a device with its own memory raises when it is read."""
    try:
        return _write(way, dtype, number, device).cpu()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("way", ["masked_fill", "masked_fill_", "index_fill_"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_dtype_does_not_hold_raises(dtype: torch.dtype, way: str) -> None:
    for number in NUMBERS:
        expected, found = _outcome(way, dtype, number, "cpu"), _outcome(way, dtype, number, D)
        assert type(found) is type(expected), f"{number}: {expected}"
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected or not device_in_use().client.shares_host_memory
        else:
            assert found.dtype is dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_device_with_its_own_memory_raises_at_the_next_read() -> None:
    checks = device_in_use().eager.checks
    with mock.patch.object(type(checks), "_available", return_value=None):
        _write("masked_fill", torch.uint8, 300, D)
        with pytest.raises(RuntimeError, match=r"masked_fill.* are allowed"):
            torch.ones(1, device=D).tolist()
        assert _write("masked_fill", torch.float16, -math.inf, D).tolist() == [-math.inf, 1, -math.inf]
