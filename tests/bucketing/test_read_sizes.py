"""Parts behind an op that runs in eager: sizes that vary are read off what its results have of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close


def by_eager(x: Tensor) -> Tensor:
    """No op takes this dtype."""
    return x.to(torch.float8_e4m3fnuz).float()


def longer(x: Tensor) -> Tensor:
    return by_eager(torch.cat([x, x.new_zeros(1, 3)])).softmax(0)


def twice_less_one(x: Tensor) -> Tensor:
    return by_eager(torch.cat([x, x[1:]])).cumsum(0)


@torch.no_grad()
@pytest.mark.parametrize("model", [longer, twice_less_one])
def test_a_size_follows_from_a_multiple_and_a_number(
    model: Callable[[Tensor], Tensor], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    before = recorder.snapshot()
    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    for size in (17, 18, 21, 24, 23, 19, 22):  # one bucket
        x = torch.randn(size, 3)
        assert_close(compiled(x), model(x))
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.compiles - before.compiles <= 3  # parts
