"""Forward-mode derivatives on the device: tangents lie in memory as their primals do, of which autograd makes views of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

from tests.tolerances import assert_close

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "with gaps": lambda x: x[..., 1],
    "behind an offset": lambda x: x[1:, 1:],
    "transposed": lambda x: x.permute(2, 0, 1),
    "reshaped": lambda x: x.view(-1).view(4, 6),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda x: x[1:],
    "views of views": lambda x: x.transpose(0, -1)[..., :2].unsqueeze(0) * 2,
    "a product": lambda x: x.mT @ x.sin(),
    "written": lambda x: x.sin().mul_(x),
    "written through a view": lambda x: x.exp().index_fill_(0, torch.zeros(1, dtype=torch.long, device=x.device), 3.0),
    "on the host": lambda x: torch.linalg.eigvals(
        x.reshape(-1)[:4].view(2, 2) + 3 * torch.eye(2, device=x.device)
    ).abs(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("view", VIEWS)
def test_tangents_of_views(view: str, name: str) -> None:
    made, direction = torch.rand(3, 4, 2, dtype=torch.float64), torch.rand(3, 4, 2, dtype=torch.float64)

    def run(device: str) -> tuple[Tensor, Tensor | None]:
        x, along = (VIEWS[view](each.clone().to(device)) for each in (made, direction))
        with forward_mode.dual_level():
            result = FUNCTIONS[name](forward_mode.make_dual(x, along.contiguous()))
            unpacked = forward_mode.unpack_dual(result)
            return unpacked.primal.cpu(), unpacked.tangent.cpu()

    for ours, eagers in zip(run("dynaxla"), run("cpu"), strict=True):
        assert_close(ours, eagers)


def test_forward_over_reverse_of_a_view() -> None:
    made, weights = torch.rand(5, 5, 2, dtype=torch.float64), torch.rand(5, 5, 2, dtype=torch.float64)

    def run(device: str) -> Tensor:
        x, weight = made.clone().to(device)[..., 0].requires_grad_(), weights.clone().to(device)[..., 0]
        with forward_mode.dual_level():
            dual, gradient = (forward_mode.make_dual(each, torch.ones_like(each)) for each in (x, weight))
            (found,) = torch.autograd.grad(dual.t() @ dual, dual, gradient, create_graph=True)
            tangent: Tensor = forward_mode.unpack_dual(found).tangent
            return tangent.cpu()

    assert_close(run("dynaxla"), run("cpu"))
