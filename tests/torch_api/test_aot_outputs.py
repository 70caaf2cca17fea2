"""What the wall relies on of outputs of AOTAutograd's that share memory, and what it mends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dynaxla.torch_api import aot_outputs
from tests.tolerances import assert_close
from tests.torch_api.boundary import boundary


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@boundary("aot_outputs.make_detached_outputs_of_others")
@pytest.mark.parametrize("view", [lambda y: y.t(), lambda y: y[0], lambda y: y[None], lambda y: y.unfold(0, 2, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_output_and_the_same_detached(view: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    aot_outputs.make_detached_outputs_of_others()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = view(x * 2)
        return y, y.detach(), y.data, view(x)

    x = torch.arange(9.0).view(3, 3).requires_grad_()
    results, expected = torch.compile(function, backend="aot_eager", dynamic=dynamic)(x), function(x)
    for mine, eager in zip(results, expected, strict=True):
        assert mine.requires_grad == eager.requires_grad
        assert mine.tolist() == eager.tolist()
    results[1].fill_(7)
    assert (results[0] == 7).all()
    assert (results[2] == 7).all()


@boundary("aot_outputs.take_gradients_of_overlaps")
@pytest.mark.parametrize(
    "view", [lambda y: y.unfold(-1, 2, 1), lambda y: y.as_strided((3, 2), (1, 1)), lambda y: y.t()]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_a_result_whose_elements_share_memory(view: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    aot_outputs.take_gradients_of_overlaps()

    def find_gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.arange(9.0).view(3, 3).requires_grad_()
        y = function(x)
        weights = torch.arange(1.0, y.numel() + 1).view(y.shape)
        return torch.autograd.grad((y * weights).sum(), x)[0]

    def function(x: Tensor) -> Tensor:
        return view(x.exp())

    compiled = torch.compile(function, backend="aot_eager", dynamic=dynamic)
    assert_close(find_gradient(compiled), find_gradient(function))


@boundary("aot_outputs.copy_what_is_no_view")
@pytest.mark.parametrize("gradients", [False, True])
def test_an_output_that_is_no_view_of_a_written_input(gradients: bool) -> None:
    aot_outputs.copy_what_is_no_view()

    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        return x[None].reshape(-1)

    for backend in ("aot_eager", "dynaxla"):
        torch._dynamo.reset()
        memory = torch.arange(12.0).view(4, 3).requires_grad_(gradients)
        x = (memory * 1)[:, :2]
        y = torch.compile(function, backend=backend)(x)
        assert y.tolist() == x.flatten().tolist() == [0, 2, 6, 8, 12, 14, 18, 20]
        if gradients:
            (gradient,) = torch.autograd.grad(y.sum(), memory)
            assert gradient.tolist() == [[2, 2, 0]] * 4
        else:
            y.fill_(5)
            assert x[0].tolist() == [0, 2]


@boundary("aot_outputs.detach_views_of_saved")
@pytest.mark.parametrize("detaches", [False, True])
def test_a_write_to_a_view_of_what_is_saved(detaches: bool) -> None:
    def compile_forward(module: GraphModule, _: object) -> Callable[..., Any]:
        if detaches:
            aot_outputs.detach_views_of_saved(module.graph, [1])
            module.recompile()
        return module

    def write(y: Tensor) -> None:
        with torch.no_grad():
            y.mul_(2)

    compiled = torch.compile(lambda x: x.exp().t(), backend=aot_autograd(fw_compiler=compile_forward))
    result = compiled(torch.ones(2, 3, requires_grad=True))
    write(result)
    if not detaches:
        result.sum().backward()  # a wrong gradient, in silence
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
