"""A transform or mode around a compiled function (forward-mode AD, functionalize, batched gradients): eager's values, tangents.

Two sizes: arguments that are copied for a call, and those that are read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.diagnostics import ReasonId
from dynaxla.errors import UnsupportedError
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Function = Callable[[Tensor], Tensor]


def _function(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def _differentiate_forward(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert tangent is not None, "the tangent is lost"
    return tangent


def _functionalize(function: Function, x: Tensor) -> Tensor:
    return torch.func.functionalize(function)(x)  # type: ignore[no-any-return]


def _batch_gradients(function: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    cotangents = torch.arange(1.0, 4.0)[:, None].repeat(1, len(x))
    return torch.autograd.grad(function(x), x, cotangents, is_grads_batched=True)[0]


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("size", [20, 300_000])
@pytest.mark.parametrize("transform", [_differentiate_forward, _functionalize, _batch_gradients])
def test_a_transform_around_a_call(
    transform: Callable[[Function, Tensor], Tensor], size: int, is_warm: bool, recorder: Recorder
) -> None:
    compiled = torch.compile(_function, backend="dynaxla")
    x, known = torch.randn(size), len(recorder.snapshot().fallbacks)
    if is_warm:
        compiled(x.clone().requires_grad_(transform is _batch_gradients)).detach()
    for _ in range(2):
        assert_close(transform(compiled, x), transform(_function, x))
    noted = recorder.snapshot().fallbacks[known:]
    assert any(
        ReasonId.UNSUPPORTED_TENSOR.value in line and "a transform or mode around the call" in line for line in noted
    )
    assert not any(ReasonId.INTERNAL_ERROR.value in line for line in noted)


def test_calls_after_a_transform_run_the_program(recorder: Recorder) -> None:
    compiled, x = torch.compile(_function, backend="dynaxla"), torch.randn(20)
    compiled(x)
    _differentiate_forward(compiled, x)
    with recorder.expect(compiles=0, served_eager=0):
        assert_close(compiled(x), _function(x))


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_fake_mode_around_a_call(is_warm: bool) -> None:
    """Its memory would else be that of fake tensors, for later calls too."""
    compiled, x = torch.compile(_function, backend="dynaxla"), torch.randn(20)
    if is_warm:
        compiled(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(compiled(x), FakeTensor)
    assert_close(compiled(x), _function(x))


class _Tripled(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        return result * 3 if op is torch.ops.aten.sin.default else result


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_mode_around_a_call_sees_its_ops(is_warm: bool) -> None:
    compiled, x = torch.compile(_function, backend="dynaxla"), torch.randn(20)
    if is_warm:
        compiled(x)
    with _Tripled():
        result = compiled(x)
    assert_close(result, torch.sin(x) * 6)
    assert_close(compiled(x), _function(x))


def test_a_weight_has_a_tangent() -> None:
    net, x = torch.nn.Linear(600, 600).requires_grad_(False), torch.randn(4, 600)
    compiled = torch.compile(net, backend="dynaxla")
    weight, tangents = net.weight.detach(), []
    compiled(x)
    for call in (net, compiled):
        with forward_ad.dual_level():
            del net.weight
            net.weight = forward_ad.make_dual(
                weight, torch.ones(600, 600)
            )  # as torch's tutorial of forward-mode AD has it
            tangents.append(forward_ad.unpack_dual(call(x)).tangent)
    assert_close(tangents[1], tangents[0])


def test_the_option_that_refuses_eager() -> None:
    compiled = torch.compile(_function, backend="dynaxla", options={"fallback": "error"})
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="a transform or mode around the call"):
            _differentiate_forward(compiled, torch.randn(20))
