"""`dynaxla.compare`: two functions beside a run in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.errors import ComparisonError
from dynaxla.verify.float64_mode import Float64Mode


def softmax(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1)


def test_equal_functions_are_equal_and_print_as_a_table() -> None:
    found = dynaxla.compare(softmax, torch.compile(softmax, backend="dynaxla"), torch.randn(8, 5))
    assert found.is_close
    assert found.is_as_near
    (output,) = found.outputs
    assert (output.path, output.what, output.is_within) == ("", "float32[8, 8]", True)
    assert output.f is not None
    assert 0 < output.f.absolute < 1e-6
    head, line = str(found).splitlines()
    assert head.split("  ")[0] == "output"
    assert line.startswith("(all)")
    assert line.endswith("yes     yes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_the_suggestion_takes_what_is_right_and_refuses_what_is_wrong(dtype: torch.dtype) -> None:
    """It follows from f's error alone."""

    def f(x: Tensor) -> Tensor:
        return x @ x.t()

    def other_order(x: Tensor) -> Tensor:
        return x.flip(1) @ x.flip(1).t()

    x = torch.randn(16, 64).to(dtype)
    right = dynaxla.compare(f, other_order, x).outputs[0]
    off = 1e-6 if dtype is torch.float64 else 30 * torch.finfo(dtype).eps
    wrong = dynaxla.compare(f, lambda x: f(x) * (1 + off), x).outputs[0]
    torch.testing.assert_close(other_order(x), f(x), rtol=right.rtol, atol=right.atol)
    assert right.is_within
    assert right.is_as_near
    assert not wrong.is_as_near
    assert (wrong.rtol, wrong.atol) == (right.rtol, right.atol)
    assert not wrong.is_within


def test_errors_are_in_units_of_the_last_place() -> None:
    x = torch.tensor([1.0, 3.0])
    found = dynaxla.compare(lambda x: x * 1, lambda x: torch.nextafter(x, x + 1), x).outputs[0]
    assert found.f is not None
    assert found.g is not None
    assert (found.f.ulps, found.g.ulps) == (0.0, 1.0)
    assert found.g.absolute == 2**-22


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def test_modules_stay_as_they_are() -> None:
    model = Normed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, 6, requires_grad=True)
    assert dynaxla.compare(model, torch.compile(model, backend="dynaxla"), x).is_close
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.linear.weight.dtype is torch.float32
    assert x.grad is None


def test_pytrees_gradients_and_weights_in_a_closure() -> None:
    w, constant = torch.randn(5, 5), torch.tensor(0.5)

    def f(batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
        y = (batch["x"] @ w + constant.to(torch.float32)).softmax(-1) * scale
        (gradient,) = torch.autograd.grad(y.square().sum(), batch["x"])
        return {"y": y, "gradient": gradient, "count": 3, "index": y.argmax(-1), "half": y.half()}

    batch = {"x": torch.randn(4, 5, requires_grad=True), "n": 2}
    found = dynaxla.compare(f, torch.compile(f, backend="dynaxla"), batch, scale=2.0)
    assert [each.path for each in found.outputs] == ["['y']", "['gradient']", "['count']", "['index']", "['half']"]
    assert found.is_close
    y, _, count, index, half = found.outputs
    assert y.f is not None
    assert y.f.absolute > 0
    assert (count.f, index.f, count.rtol) == (None, None, 0.0)
    assert half.what == "float16[4, 5]"
    assert w.dtype is torch.float32


def test_a_wrong_output_is_told() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.argmax()

    found = dynaxla.compare(f, lambda x: (x.sin() * 1.01, x.argmin()), torch.randn(9))
    assert not found.is_close
    assert [each.is_within for each in found.outputs] == [False, False]
    lines = str(found).splitlines()
    assert lines[1].endswith("NO      NO")
    assert lines[3].startswith("not close: [0]: off by")


def test_random_draws_of_both_are_the_same() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    assert dynaxla.compare(f, f, torch.randn(50)).is_close
    compiled = torch.compile(f, backend="dynaxla", options={"rng": "eager"})
    assert dynaxla.compare(f, compiled, torch.randn(50)).is_close


UNEQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "structure": (lambda x: (x, x), lambda x: [x, x], "other structures"),
    "count": (lambda x: (x, x), lambda x: x, "other structures"),
    "dtype": (lambda x: x, lambda x: x.double(), "other dtypes: float32.* and float64"),
    "shape": (lambda x: x, lambda x: x[None], "other shapes: float32.4, 3. and float32.1, 4, 3."),
    "kind": (lambda x: x, lambda x: 3, "other shapes: float32.4, 3. and 3"),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_outputs_are_an_error(name: str) -> None:
    f, g, message = UNEQUAL[name]
    with pytest.raises(ComparisonError, match=message):
        dynaxla.compare(f, g, torch.randn(4, 3))


def test_strides_are_compared_where_asked_for() -> None:
    f, g = (lambda x: x.clone()), (lambda x: x.t().clone(memory_format=torch.contiguous_format).t())
    x = torch.randn(4, 3)
    assert dynaxla.compare(f, g, x).is_close
    with pytest.raises(ComparisonError, match=r"other strides: \(3, 1\) and \(1, 4\)"):
        dynaxla.compare(f, g, x, check_strides=True)


def test_what_does_not_run_in_float64_is_an_error() -> None:
    def f(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x + 1

    with pytest.raises(ComparisonError, match="does not run in float64: AssertionError"):
        dynaxla.compare(f, f, torch.randn(3))


def test_overflow_is_told_as_such() -> None:
    found = dynaxla.compare(lambda x: x * x, lambda x: x * x, torch.full((2,), 1e4).half())
    (output,) = found.outputs
    assert output.f is not None
    assert "finite in other places" in output.f.problem
    assert output.is_as_near


def test_float64_keeps_what_is_written() -> None:
    held = torch.zeros(3)
    with Float64Mode():
        held.add_(torch.full((3,), 1 / 3, dtype=torch.float32))
        result = held * 3
    assert result.dtype is torch.float64
    assert result.tolist() == [1.0] * 3
    assert held.tolist() == [0.0] * 3
