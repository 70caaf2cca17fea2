"""Backwards that Dynamo captures as a whole: torch's compiled autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close


@pytest.fixture
def compiled_backward() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


def test_numbers_that_autograd_saved_as_tensors(recorder: Recorder, compiled_backward: None) -> None:
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        for factor in range(3):
            (x * factor).sum().backward()
        assert x.grad is not None
        return x.grad

    known = len(recorder.snapshot().fallbacks)
    result = torch.compile(accumulate, backend="dynaxla")(torch.ones(3, 4, requires_grad=True))
    assert_close(result, accumulate(torch.ones(3, 4, requires_grad=True)))
    assert len(recorder.snapshot().fallbacks) == known


def test_hooks_that_a_backward_calls_leave_the_forward_its_buckets(recorder: Recorder, compiled_backward: None) -> None:
    """The graphs hand on an object that holds the hooks."""

    def differentiate(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient + 1)
        y.sin().sum().backward()
        assert x.grad is not None
        return x.grad

    known = len(recorder.snapshot().exact_shapes)
    compiled = torch.compile(differentiate, backend="dynaxla", dynamic=True)
    for rows in (3, 5):
        assert_close(
            compiled(torch.ones(rows, 4).requires_grad_()), differentiate(torch.ones(rows, 4).requires_grad_())
        )
    assert len(recorder.snapshot().exact_shapes) == known


def test_the_loop_of_a_recurrent_layer_has_one_length(recorder: Recorder, compiled_backward: None) -> None:
    """A capture of a backward has a size of its own for each saved tensor."""
    layer = torch.nn.GRU(4, 3)
    known = len(recorder.snapshot().fallbacks)

    @torch.compile(backend="dynaxla")
    def train(x: torch.Tensor) -> None:
        layer(x)[0].square().sum().backward()

    for steps in (5, 8, 32, 5):
        x = torch.randn(steps, 2, 4)
        layer.zero_grad()
        train(x)
        with torch._dynamo.config.patch(compiled_autograd=False):
            expected = torch.autograd.grad(layer(x)[0].square().sum(), tuple(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            assert_close(parameter.grad, gradient)
    assert len(recorder.snapshot().fallbacks) == known
