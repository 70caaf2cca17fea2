"""Forward-mode derivatives stay in the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.observe.recorder import Recorder

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda x: F.glu(x, -1),
    "mse": lambda x: F.mse_loss(x, x.roll(1, 0)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.roll(1, 0)),
    "cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.roll(1, 0).sigmoid()),
    "padded": lambda x: F.pad(x.t(), (1, 2), value=3.0),
    "diag": lambda x: torch.diag(x[0]),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "sgn": torch.sgn,
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jvp_is_one_program(name: str, batched: bool, recorder: Recorder) -> None:
    def run(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(FUNCTIONS[name], (x,), (tangent,))  # type: ignore[no-any-return]

    function = torch.vmap(run) if batched else run
    sizes = (3, 4, 6) if batched else (4, 6)
    x, tangent = torch.randn(sizes), torch.randn(sizes)
    with recorder.expect(graphs=1, eager_ops=0):
        given = torch.compile(function, backend="dynaxla")(x, tangent)
    torch.testing.assert_close(given, function(x, tangent))


def test_a_hessian_by_forward_over_reverse(recorder: Recorder) -> None:
    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(F.glu(x.view(2, 4), -1), torch.ones(2, 2))

    x = torch.randn(8)
    with recorder.expect(graphs=1, eager_ops=0):
        given = torch.compile(torch.func.hessian(loss), backend="dynaxla")(x)
    torch.testing.assert_close(given, torch.func.hessian(loss)(x))
