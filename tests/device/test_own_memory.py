"""On the device, too, compiled results and those of single ops have memory of their own, and eager's strides."""

from __future__ import annotations

import pytest
import torch

from tests.device.test_compiled import DEVICE
from tests.passes.test_own_memory import OWN, STRIDES
from tests.same_layout import assert_same_layout
from tests.tolerances import assert_close


@pytest.mark.parametrize("name", [*OWN, "memory with gaps", "every second", "repeated"])
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_results_lie_as_eagers(name: str, dynamic: bool | None) -> None:
    """None: op by op, without a graph."""
    torch._dynamo.reset()
    function = {**OWN, **STRIDES}[name]
    run = function if dynamic is None else torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for rows in (5, 7) if dynamic else (5,):
        x = torch.randn(rows, 6)
        mine = x.to(DEVICE)
        expected, actual = function(x), run(mine)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one.cpu(), other)
        assert_same_layout(actual, expected, [mine], [x])
