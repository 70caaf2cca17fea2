"""What the wall relies on of transforms around a call."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from dynaxla.torch_api import fakes, transforms
from tests.torch_api.boundary import boundary


class _Watched(torch.autograd.Function):
    """The identity, whose backward notes of each gradient what `asked` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, asked: Any, seen: list[bool]) -> Tensor:
        ctx.given = asked, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        asked, seen = ctx.given
        seen.append(asked(grad))
        return grad, None, None


def _batch_gradients(asked: Any, seen: list[bool]) -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(_Watched.apply(x, asked, seen), x, torch.eye(2), is_grads_batched=True)


@boundary("transforms.is_in_transform")
def test_a_transform_of_torch_func_is_seen() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(transforms.is_in_transform()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not transforms.is_in_transform()


@boundary("transforms.is_batched")
def test_tensors_of_either_vmap_are_seen() -> None:
    seen: list[bool] = []
    _batch_gradients(transforms.is_batched, seen)
    torch.func.vmap(lambda x: (seen.append(transforms.is_batched(x)), x)[1])(torch.ones(2))
    assert seen == [True, True]
    assert not transforms.is_batched(torch.ones(2))


@boundary("transforms.is_functional")
def test_functional_tensors_are_told_apart() -> None:
    seen: list[bool] = []
    torch.func.functionalize(lambda x: (seen.append(transforms.is_functional(x)), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not transforms.is_functional(torch.ones(2))


@boundary("transforms.is_surrounded")
def test_wrapped_tensors_are_seen() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(transforms.is_surrounded([1, torch.ones(2), x]))
        return x * 1

    x = torch.ones(2)
    _batch_gradients(lambda grad: transforms.is_surrounded([grad]), seen)
    torch.func.vmap(look)(x)
    torch.func.functionalize(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.vjp(look, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        look(dual)
        assert not transforms.is_surrounded([x, 2])
        with torch._C._AutoDispatchBelowAutograd():  # torch refuses to unpack it there
            assert not transforms.is_surrounded([dual])
    with FakeTensorMode(allow_non_fake_inputs=True):
        look(x)
    assert seen == [True] * 7
    assert not transforms.is_surrounded([x, 2])


@boundary("transforms.let_parts_run")
def test_modes_that_let_parts_run_are_told_apart() -> None:
    with FakeTensorMode() as mode:
        assert transforms.is_surrounded([])
        transforms.let_parts_run(mode)
        assert not transforms.is_surrounded([])


@boundary("transforms.is_surrounded")
def test_the_mode_of_a_first_run_is_not_taken_for_a_users() -> None:
    """AOTAutograd looks what custom ops return."""
    seen: list[bool] = []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *args: (seen.append(transforms.is_surrounded(args)), module(*args))[1])

    compiled = torch.compile(torch.sin, backend=aot_autograd(fw_compiler=compiler))
    compiled(torch.ones(2))
    assert seen == [False]


@boundary("fakes.is_given_fake")
def test_fake_tensors_of_a_capture_are_told_from_those_that_are_given() -> None:
    seen: list[bool] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        standing = TracingContext.get().fake_mode.from_tensor(torch.ones(2))  # type: ignore[union-attr]
        seen.extend(map(fakes.is_given_fake, [*inputs, standing]))
        return module.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    with FakeTensorMode() as mode:
        torch.compile(torch.cos, backend=backend)(mode.from_tensor(torch.ones(2)))
    assert seen == [False, False, True, False]
