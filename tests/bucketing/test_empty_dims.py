"""Dims without elements beside sizes that vary: views of them run in buckets, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.same_layout import assert_same_strides
from tests.tolerances import assert_close

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": lambda x: x.reshape(-1) * 2,
    "flattened twice": lambda x: (x.flatten() * 2).view(-1, 1).flatten(),
    "a transpose": lambda x: x.t().reshape(-1) + 1,
    "dims exchanged": lambda x: x.reshape(x.shape[1], 0) + 1,
    "a dim of one": lambda x: x.unsqueeze(0).reshape(3, 0) * 2,
    "another size beside it": lambda x: x.reshape(0, x.shape[1] * 2).sum(1),
    "sums": lambda x: x.view(-1).sum() + x.sum(1).view(-1).sum(),
    "a sum of all products": lambda x: torch.tensordot(x, x, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_without_elements(name: str, recorder: Recorder) -> None:
    function = VIEWS[name]
    compiled = torch.compile(function, backend="dynaxla", options={"bucketing": "require"})
    for size in (7, 9, 20, 12):
        x = torch.randn(0, size, requires_grad=True)
        mine, eager = compiled(x), function(x)
        assert_close(mine, eager)
        assert_same_strides([mine], [eager])
        mine.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_medians_of_no_elements(dtype: torch.dtype, recorder: Recorder) -> None:
    def medians(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:0].median(), x[5:].median(), x[:, 3:].nanmedian(), x.median()]

    compiled = torch.compile(medians, backend="dynaxla", dynamic=True)
    with recorder.expect(eager_ops=0):
        for size in (5, 6, 9):
            x = (torch.rand(size, 3) * 9).to(dtype)
            torch.testing.assert_close(compiled(x), medians(x), rtol=0, atol=0, equal_nan=True)
