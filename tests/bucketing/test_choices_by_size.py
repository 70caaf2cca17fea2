"""Where eager chooses its way by a size, the true size decides in a bucket, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder


@pytest.mark.parametrize("columns", [None, 3])
def test_distances_by_a_product_or_not(columns: int | None, recorder: Recorder) -> None:
    """Up to 25 rows eager takes gaps, by which a point is at 0 from itself; above, a product, which is some 1e-3 off there."""

    def distances(x: Tensor) -> Tensor:
        return torch.cdist(x, x[:columns])

    compiled = torch.compile(distances, backend="dynaxla", dynamic=True)
    with recorder.expect(eager_ops=0):
        for rows in (17, 20, 24, 25, 26, 30, 32):
            x = torch.randn(rows, 4)
            near = 1e-5 if rows <= 25 else 5e-3
            torch.testing.assert_close(compiled(x), distances(x), rtol=1e-5, atol=near)
