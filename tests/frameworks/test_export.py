"""torch.export: exported programs are compiled as modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).softmax(0))


@pytest.mark.parametrize("decomposed", [False, True])
@torch.no_grad()
def test_exported_programs(decomposed: bool, recorder: Recorder) -> None:
    """Sizes that were exported as varying go to buckets: 9, 12 and 15 to one."""
    net = Net().eval()
    program = export(net, (torch.randn(5, 8),), dynamic_shapes={"x": {0: Dim("rows", min=2, max=64)}})
    module = (program.run_decompositions() if decomposed else program).module()
    compiled = torch.compile(module, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=2, eager_ops=0):
        for rows in (5, 9, 12, 15, 6):
            x = torch.randn(rows, 8)
            assert_close(compiled(x), net(x))
