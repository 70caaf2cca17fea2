"""`torch.inference_mode` on the device: ops that the device computes, and those that run on the host, of tensors from within
and from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "computed": lambda x: (x @ x.mT + 1, x.view(-1)[1:]),
    "in place": lambda x: (x.mul_(2).add_(1), x[0].zero_(), x.t().sin_()),
    "written through a view": lambda x: x.view(-1).__setitem__(slice(2, 5), 7.0),
    "lists in place": lambda x: torch._foreach_add_([x, x[1]], 2.0),
    "sizes of values": lambda x: (torch.nonzero(x > 0), x[x > 0], torch.unique(x.round())),
    "a number": lambda x: (x.sum().item(), x.tolist(), bool((x > 100).any())),
    "on the host": lambda x: (torch.linalg.eigvals(x).abs().sort().values, torch.geqrf(x)[1].abs()),
    "on the host, packed": lambda x: torch._transform_bias_rescale_qkv(
        x.repeat(1, 3)[None], x[0].repeat(3), num_heads=2
    ),
    "on the host, into a result": lambda x: torch.geqrf(x, out=(x.new_empty(4, 4), x.new_empty(4))),
    "resized": lambda x: x.clone().resize_(2, 3).shape,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inside", [True, False], ids=["of tensors from within", "of tensors from outside"])
def test_ops_are_those_of_the_host(name: str, inside: bool) -> None:
    given = torch.randn(4, 4)

    def run(device: str) -> tuple[Any, Tensor]:
        with torch.inference_mode(inside):
            x = given.clone().to(device)
        with torch.inference_mode():
            return CALLS[name](x), x

    (ours, x), (eagers, y) = run("dynaxla"), run("cpu")
    check(ours, eagers)
    check(x, y)
    if not inside:
        assert x._version == y._version


def check(ours: Any, eagers: Any) -> None:
    if isinstance(eagers, Tensor):
        assert ours.is_inference() == eagers.is_inference()
        assert_close(ours.cpu(), eagers)
    elif isinstance(eagers, (tuple, list)):
        for mine, its in zip(ours, eagers, strict=True):
            check(mine, its)
    elif isinstance(eagers, float):
        assert ours == pytest.approx(eagers, rel=1e-5)
    else:
        assert ours == eagers
