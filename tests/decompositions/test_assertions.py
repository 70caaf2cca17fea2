"""Assertions about values: compiled, and checked after the run, as eager raises.

Dynamo makes `_assert_async` of a Python `assert` about a tensor; here pytest has made other code of those before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

aten = torch.ops.aten
Function = Callable[..., Any]


def raised(function: Function, *args: Any) -> str | None:
    try:
        function(*args)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return None


def several(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._assert_async((y >= 0).all(), "negative")
    y = y * 2
    torch._assert_async((y >= 2).all(), "below two")
    torch._assert_async(y.sum() < 1000, "")
    torch._assert_async(y.min().reshape(1, 1))
    return y


@torch.no_grad()
def test_the_first_that_fails_raises_its_own_message(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    before = recorder.snapshot().exact_shapes
    compiled = torch.compile(several, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (9, 11, 12):
            x = torch.rand(size, 3)
            assert_close(compiled(x), several(x))
            for wrong in (x - 3, x - 0.9, x + 1000):
                assert raised(compiled, wrong) == raised(several, wrong) is not None
    assert recorder.snapshot().exact_shapes == before


@torch.no_grad()
@pytest.mark.parametrize("value", [0.0, float("nan"), 2.0, -0.0])
def test_any_number_is_asserted_not_to_be_zero(value: float, recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x)
        return x + 1

    x = torch.full((1, 1), value)
    with recorder.expect(compiles=1, eager_ops=0):
        assert raised(torch.compile(model, backend="dynaxla"), x) == raised(model, x)


@torch.no_grad()
def test_other_overloads_and_what_capture_has_checked(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        aten._assert_tensor_metadata(x, dtype=torch.float32)
        return torch._functional_assert_async((x > 0).all(), "positive", x) + 1

    compiled, x = torch.compile(model, backend="dynaxla"), torch.rand(3) + 0.1
    with recorder.expect(compiles=1, eager_ops=0):
        assert_close(compiled(x), model(x))
        assert raised(compiled, -x) == "positive"


def checked(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x >= 0)
    y = x + 1
    torch._check_tensor_all(y < 9, lambda: "too large")
    torch._check_tensor_all(message=None, cond=y[..., :1] >= 1)
    return y * 2


@torch.no_grad()
def test_checks_of_tensors_are_assertions(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo itself ends a graph at each."""
    poison(monkeypatch)
    compiled = torch.compile(checked, backend="dynaxla", dynamic=True, fullgraph=True)
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (9, 11, 12):
            x = torch.rand(size, 3)
            assert_close(compiled(x), checked(x))
            for wrong in (x - 2, x + 9):
                assert raised(compiled, wrong) == raised(checked, wrong) is not None


def test_checks_that_are_no_assertions_raise_as_ever() -> None:
    def named(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0, lambda: f"{x.tolist()} is not positive")
        return x + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all_with(RuntimeError, x > 0)
        return x + 1

    for function in (named, other):
        compiled, x = torch.compile(function, backend="dynaxla"), torch.ones(3)
        assert_close(compiled(x), function(x))
        assert raised(compiled, -x) == raised(function, -x) is not None
    assert raised(torch.compile(checked, backend="eager"), -torch.ones(3)) == raised(checked, -torch.ones(3))


@torch.no_grad()
def test_several_values_are_none(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x)
        return x + 1

    compiled, x = torch.compile(model, backend="dynaxla"), torch.ones(2)
    with recorder.expect(eager_ops=1):
        assert raised(compiled, x) == raised(model, x)
    reason = recorder.snapshot().fallbacks[-1]
    assert "side_effect" in reason
    assert "it may raise" in reason


@torch.no_grad()
def test_between_eager_ops_it_is_checked_in_its_turn(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> Any:
        torch._assert_async((x >= 0).all(), "first")
        places = torch.nonzero(x)
        torch._assert_async((x.exp() < 2).all(), "second")
        return places, x + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend="dynaxla")
        x = torch.rand(4) / 2
        with recorder.expect(eager_ops=1):
            assert_close(compiled(x)[1], x + 1)
        assert raised(compiled, -x) == "first"
        assert raised(compiled, x + 1) == "second"


@torch.no_grad()
@pytest.mark.parametrize("elements", [8, 1 << 18])
def test_a_write_behind_a_failed_assertion_is_not_made(elements: int) -> None:
    """The larger input is one that is written to in place between two executables."""

    def model(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x >= 0).all(), "negative")
        cache[2:5] = x
        return cache.sum()

    compiled = torch.compile(model, backend="dynaxla")
    cache, x = torch.zeros(elements), torch.rand(3)
    assert_close(compiled(cache, x), x.sum())
    assert raised(compiled, cache, -x) == "negative"
    assert_close(cache[2:5], x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        torch._assert_async((y < 50).all(), "too large")
        return y.sin()


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_training_asserts_in_the_forward(how: str, recorder: Recorder) -> None:
    model = Model()

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
        return result

    compiled = torch.compile(run, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=2, eager_ops=0):
        for size in (5, 6, 7):
            x = torch.rand(size, 3, requires_grad=True)
            (found,) = torch.autograd.grad(compiled(x).sum(), [model.weight])
            (expected,) = torch.autograd.grad(model(x).sum(), [model.weight])
            assert_close(found, expected)
        assert raised(compiled, x + 300) == "too large"


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch._assert_async((grad < 5).all(), "a large gradient")
        return grad * 2


def test_training_asserts_in_the_backward(recorder: Recorder) -> None:
    x = torch.rand(5, requires_grad=True)
    compiled = torch.compile(lambda x: Checked.apply(x), backend="dynaxla")
    with recorder.expect(compiles=2, eager_ops=0):
        compiled(x).sum().backward()
        assert raised(compiled(x).backward, torch.full((5,), 6.0)) == "a large gradient"


@torch.no_grad()
def test_regions() -> None:
    """A region that is called is part of its graph; a branch that asserts runs in eager, which names the assertion."""

    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 5).all(), "in a region")
        return x + 1

    before = dynaxla.read_metrics()
    compiled, x = torch.compile(lambda x: layer(layer(x)), backend="dynaxla"), torch.rand(3)
    assert_close(compiled(x), x + 2)
    assert raised(compiled, x + 4) == "in a region"
    assert dynaxla.read_metrics().eager_ops == before.eager_ops

    def positive(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 5).all(), "in a branch")
        return x + 1

    compiled = torch.compile(lambda x: torch.cond(x.sum() > 0, positive, torch.neg, (x,)), backend="dynaxla")
    assert_close(compiled(x), x + 1)
    assert "aten._assert_async.msg in its sub-graph: side_effect" in dynaxla.read_metrics().fallbacks[-1]
    assert "in a branch" in (raised(compiled, x + 5) or "")
