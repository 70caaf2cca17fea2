"""Inputs that are neither tensors nor numbers go around the compiled parts, to the eager ops and outputs that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

ROWS = (5, 6, 9, 12, 33)
BUCKETS = 3  # 8, 16, 64


class Scale(OpaqueBase):
    """What torch hands on to ops without looking into it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


register_opaque_type(Scale, typ="reference")


@torch.library.custom_op("opaque_tests::scaled", mutates_args=())
def scaled(x: Tensor, scale: Scale) -> Tensor:
    return x * scale.factor


@scaled.register_fake
def _fake_scaled(x: Tensor, scale: Scale) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, gradient: (scaled(gradient, ctx.scale), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)


class ScaledGradient(torch.autograd.Function):
    """Its forward only hands the object on to its backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: Scale) -> Tensor:
        context.scale = scale
        return x.exp()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return scaled(gradient, context.scale), None


def dropped(x: Tensor, first: Scale, second: Scale) -> tuple[Any, ...]:
    scaled(x, second)  # AOTAutograd removes the call, not the input
    return second, (x.exp() * x).sum(-1), first


def handed_on(x: Tensor, first: Scale, second: Scale) -> tuple[Any, ...]:
    return (ScaledGradient.apply(x, first).sum(-1) * 2,)


def read(x: Tensor, first: Scale, second: Scale) -> tuple[Any, ...]:
    return second, scaled(x.relu() + 1, first).exp().sum(-1)


def compile_powers(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=True, options={"buckets": dynaxla.PowersOfTwo()})


def _call(function: Callable[..., Any], rows: int, training: bool) -> list[Any]:
    """The results, and the gradient in training. The objects are others at every call."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 4).mul(0.3).requires_grad_(training)
    objects = Scale(1 / rows), Scale(2.0)
    results = list(function(x, *objects))
    (made,) = (value for value in results if isinstance(value, Tensor))
    if training:
        made.square().sum().backward()
        assert x.grad is not None
        results.append(x.grad)
    return [objects.index(value) if isinstance(value, Scale) else value for value in results]


def _assert_same(ours: list[Any], wanted: list[Any]) -> None:
    for mine, its in zip(ours, wanted, strict=True):
        if isinstance(its, Tensor):
            assert_close(mine, its)
        else:
            assert mine == its


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_whose_ops_read_no_object_is_one_program_per_bucket(training: bool, recorder: Recorder) -> None:
    compiled = compile_powers(dropped)
    graphs = 2 if training else 1
    with recorder.expect(graphs=graphs, compiles=BUCKETS * graphs, eager_ops=0):
        for rows in ROWS:
            _assert_same(_call(compiled, rows, training), _call(dropped, rows, training))


def test_a_forward_hands_an_object_on_to_its_backward(recorder: Recorder) -> None:
    compiled = compile_powers(handed_on)
    with recorder.expect(graphs=2, eager_ops=1):
        for rows in ROWS:
            _assert_same(_call(compiled, rows, True), _call(handed_on, rows, True))


@pytest.mark.parametrize("training", [False, True])
def test_an_op_that_reads_an_object_runs_in_eager_between_parts(training: bool, recorder: Recorder) -> None:
    compiled = compile_powers(read)
    with recorder.expect(compiles=BUCKETS * (4 if training else 2), eager_ops=2 if training else 1):
        for rows in ROWS:
            _assert_same(_call(compiled, rows, training), _call(read, rows, training))
    reasons = dynaxla.read_metrics().fallbacks
    assert any("opaque_tests.scaled.default (float32) runs in eager PyTorch: custom_op" in text for text in reasons)
    assert any("it takes or gives an object: Scale" in text for text in reasons)


def test_programs_are_compiled_in_the_background() -> None:
    """The process that compiles gets a graph without the object."""
    compiled = torch.compile(dropped, backend="dynaxla", dynamic=True, options={"compile": "behind"})
    for rows in ROWS:
        _assert_same(_call(compiled, rows, False), _call(dropped, rows, False))
