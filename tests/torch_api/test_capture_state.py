"""What capturing a graph again, after its capture, relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dynaxla.torch_api.capture_state import (
    CaptureState,
    find_fixed_floats,
    find_replaced_formula,
    guard_floats,
    is_guarded_by_memory,
    read_floats,
)
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
        state = CaptureState(inputs)
        capture = aot_autograd(fw_compiler=note, bw_compiler=note)
        agains.append(lambda: state.capture_again(lambda: capture(module, state.inputs)))
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


@boundary("capture_state.find_replaced_formula")
def test_a_kernel_or_a_decomposition_of_the_users_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backend's kernel the shapes alone are asked for while a graph is traced."""
    assert find_replaced_formula() is None
    for key, found in (("CPU", None), ("AutogradCPU", "aten._chunk_cat")):
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("_chunk_cat", lambda *args: args[0][0], key)
            assert find_replaced_formula() == found
        finally:
            library._destroy()
    assert find_replaced_formula() is None
    monkeypatch.setitem(decomposition_table, torch.ops.aten.silu.default, lambda x: x * 2)
    assert find_replaced_formula() == "aten.silu.default"


@boundary("capture_state.is_guarded_by_memory")
@torch.no_grad()
def test_guards_on_memory_are_known_when_a_graph_is_compiled() -> None:
    seen: list[bool] = []

    def note(module: GraphModule, inputs: object) -> Any:
        seen.append(is_guarded_by_memory())
        return module.forward

    def add(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    memory = torch.ones(8)
    for y in (torch.ones(4), memory[4:], memory[2:6]):
        torch._dynamo.reset()
        torch.compile(add, backend=aot_autograd(fw_compiler=note), dynamic=True)(memory[:4], y)
    assert seen == [False, True, True]
    assert not is_guarded_by_memory()


@boundary("capture_state.read_floats", "capture_state.find_fixed_floats", "capture_state.guard_floats")
@torch.no_grad()
@pytest.mark.parametrize("guards", [False, True])
def test_floats_that_tracing_makes_constants_of_are_known(guards: bool) -> None:
    seen: list[tuple[dict[str, float], list[str]]] = []

    def note(module: GraphModule, inputs: object) -> Any:
        seen.append((read_floats(), find_fixed_floats()))
        guard_floats(read_floats() if guards else [])
        return module.forward

    for function in (lambda x, m: x * m, lambda x, m: x * m + int(m), lambda x, m: x.clamp(max=m - 0.25)):
        torch._dynamo.reset()
        seen.clear()
        compiled = torch.compile(function, backend=aot_autograd(fw_compiler=note))
        for number in (1.5, 2.5, 3.5):  # a constant at first
            compiled(torch.ones(2), number)
        is_fixed = any(fixed for _, fixed in seen)
        assert [list(floats.values()) for floats, _ in seen] == [[], [2.5], [3.5]][: 3 if is_fixed or guards else 2]
        assert all(fixed == (list(floats) if is_fixed else []) for floats, fixed in seen)
    assert is_fixed
    assert read_floats() == {}
    assert find_fixed_floats() == []
