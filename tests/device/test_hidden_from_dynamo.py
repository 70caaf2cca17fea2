"""Ops of a compiled function between its graphs: Dynamo traces what is called there, and sees no code of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dynaxla

PACKAGE = str(Path(dynaxla.__file__).parent)


def _step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Tensor], object]:
    def run(x: Tensor) -> object:
        weight = torch.nn.Parameter(x.clone())
        weight.grad = x.clone()
        return optimizer([weight], lr=0.1, **options).step()  # type: ignore[call-arg]

    return run


def _product_in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("dynaxla", torch.bfloat16):
        return x @ x


CALLS: Mapping[str, Callable[[Tensor], object]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "zeros_like": torch.zeros_like,
    "empty_like": torch.empty_like,
    "full_like": lambda x: torch.full_like(x, 2),
    "new_empty": lambda x: x.new_empty(3),
    "like on the host": lambda x: torch.ones_like(x, device="cpu"),
    "copies of lists": lambda x: torch._foreach_copy_([x, x.clone()], [x.clone(), x]),
    "sums of lists": lambda x: torch._foreach_add_([x, x.clone()], 1),
    "SGD": _step(torch.optim.SGD),
    "AdamW": _step(torch.optim.AdamW),
    "fused Adam": _step(torch.optim.Adam, fused=True),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "autocast": _product_in_bfloat16,
    "state of the generator": lambda x: torch.dynaxla.set_rng_state(torch.dynaxla.get_rng_state()),
    "seed": lambda x: torch.dynaxla.manual_seed(3),
    "shard": lambda x: dynaxla.shard(x, dynaxla.make_mesh((1,), ("data",)), ("data",)),
    "loader": lambda x: list(dynaxla.DeviceLoader([torch.ones(2)])),
    "from dlpack": torch.from_dlpack,
    "text": str,
    "number": lambda x: x[0, 0].item(),
    "host": lambda x: x.cpu(),
}


@pytest.mark.parametrize("name", CALLS)
def test_dynamo_sees_no_code_of_the_device(name: str, device: torch.device) -> None:
    traced: list[str] = []

    def backend(module: GraphModule, _: object) -> Callable[..., Any]:
        traced.extend(node.stack_trace or "" for node in module.graph.nodes)
        return module.forward

    def run(x: Tensor) -> None:
        try:  # Dynamo cannot go on within it, so that all of the function runs as it is
            torch._dynamo.graph_break()
            CALLS[name](x)
        finally:
            x.add_(1)

    torch._dynamo.reset()
    torch.compile(run, backend=backend)(torch.randn(4, 4, device=device))
    assert not [line for line in traced if PACKAGE in line]
