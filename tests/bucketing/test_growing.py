"""Sizes of caches that grow are symbols at the first call, and no others are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs


def _decode(keys: Tensor, values: Tensor, mask: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    keys, values = torch.cat([keys, new], 2), torch.cat([values, new * 2], 2)
    return keys, values, (keys * values).sum((1, 3)) * mask


def _look(keys: Tensor, values: Tensor, mask: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    return keys + new, values + new, (keys * values).sum((1, 3)) * mask[:, :-1]


def _inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    caches = torch.randn(2, 1, 2, length, 3)
    return caches[0], caches[1], torch.ones(1, length + 1, dtype=torch.int64), torch.randn(1, 2, 1, 3)


def test_a_cache_that_grows_is_captured_once(recorder: Recorder) -> None:
    compiled = torch.compile(_decode, backend="dynaxla")
    with eager_programs(), recorder.expect(graphs=1, compiles=1, eager_ops=0):
        for length in (9, 10, 11, 30, 60):
            inputs = _inputs(length)
            for got, expected in zip(compiled(*inputs), _decode(*inputs), strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [None, False])
def test_other_sizes_are_symbols_when_they_vary(dynamic: bool | None, recorder: Recorder) -> None:
    function = _decode if dynamic is False else _look
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    with eager_programs(), recorder.expect(graphs=2, compiles=2):
        for length in (9, 10):
            inputs = _inputs(length)
            for got, expected in zip(compiled(*inputs), function(*inputs), strict=True):
                torch.testing.assert_close(got, expected)
