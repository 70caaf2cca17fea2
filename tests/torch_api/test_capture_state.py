"""What capturing a graph again, after its capture, relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dynaxla.torch_api.capture_state import CaptureState
from tests.torch_api.boundary import boundary


@boundary("capture_state.CaptureState")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_is_captured_again_as_it_was(dynamic: bool) -> None:
    """In the midst of a backward too, where autograd and autocast are off: with its backward, dtypes and symbolic sizes."""
    graphs: list[str] = []
    agains: list[Callable[[], Any]] = []

    def note(module: GraphModule, inputs: object) -> Any:
        graphs.append(module.print_readable(print_output=False, include_stride=True))
        return module.forward

    def backend(module: GraphModule, inputs: Any) -> Any:
        state = CaptureState()
        capture = aot_autograd(fw_compiler=note, bw_compiler=note)
        agains.append(lambda: state.capture_again(lambda: capture(module, inputs)))
        return capture(module, inputs)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            agains[0]()
            return grad

    x = torch.ones(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch._functorch.config.patch(activation_memory_budget=0.9):
        y = torch.compile(lambda x: (x @ x).sin(), backend=backend, dynamic=dynamic)(x)
    y.float().sum().backward()
    first = list(graphs)
    assert len(first) == 2
    assert "bf16" in first[0]
    graphs.clear()
    Again.apply(x).sum().backward()
    assert graphs == first
