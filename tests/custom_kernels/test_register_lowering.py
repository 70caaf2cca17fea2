"""The door for kernels: JAX functions as the bodies of operators, in compiled graphs and in their backward."""

from __future__ import annotations

import importlib.util
import itertools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

import dynaxla
from dynaxla.errors import OptionError, UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.record import Record
from dynaxla.ops.table import OpTable
from tests.tolerances import assert_close

EXAMPLE = Path(__file__).parents[2] / "examples" / "pallas_kernel.py"
_numbers = itertools.count()


def compile_(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=dynamic, options=options)  # type: ignore[call-overload]


@pytest.fixture
def new_op() -> Iterator[Callable[..., Any]]:
    """Makes operators that no other test has seen: a lowering, once registered, stays."""
    made = []

    def make(eager: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
        defined = torch.library.custom_op(f"door_tests::op_{next(_numbers)}", eager, mutates_args=())
        defined.register_fake(fake or (lambda x, *args, **kwargs: torch.empty_like(x)))
        made.append(defined)  # an operator goes with its definition
        return defined

    yield make
    made.clear()


def identity(x: Tensor) -> Tensor:
    return x.clone()


def sine(x: Tensor) -> Tensor:
    return x.sin()


def scaled_tanh(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    return torch.tanh(x) * y * scale


def scaled_tanh_in_jax(x: Any, y: Any, scale: float = 1.0) -> Any:
    return jnp.tanh(x) * y * scale


def scaled_tanh_backward(cotangent: Any, x: Any, y: Any, scale: float = 1.0) -> Any:
    slope = 1 - jnp.tanh(x) ** 2
    return cotangent * slope * y * scale, cotangent * jnp.tanh(x) * scale


def register(op: Any, function: Callable[..., Any], **settings: Any) -> None:
    dynaxla.register_lowering(op._opoverload, function, **settings)


def test_the_function_is_part_of_one_executable(new_op: Any, recorder: Recorder) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax)
    x, y = torch.randn(2, 3, 4)
    with recorder.expect(compiles=1, eager_ops=0):
        result = compile_(lambda x, y: op(x + 1, y, 2.5) * 3)(x, y)
    assert_close(result, scaled_tanh(x + 1, y, 2.5) * 3)


def test_the_function_and_not_the_eager_kernel_runs(new_op: Any) -> None:
    op = new_op(scaled_tanh)
    register(op, lambda x, y, scale=1.0: x + y + scale)
    x, y = torch.randn(2, 3, 4)
    assert_close(compile_(lambda x, y: op(x, y))(x, y), x + y + 1)


def test_static_arguments_are_plain_values(new_op: Any, recorder: Recorder) -> None:
    def pick(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype, name: str = "sum") -> Tensor:
        return x.sum(dims, keepdim=keepdim, dtype=dtype)

    seen = []

    def pick_in_jax(x: Any, dims: Any, keepdim: Any, dtype: Any, name: str = "sum") -> Any:
        seen.append((list(dims), keepdim, dtype, name))
        return jnp.sum(x, tuple(dims), keepdims=keepdim)

    op = new_op(pick, lambda x, dims, keepdim, dtype, name="sum": x.sum(dims, keepdim=keepdim, dtype=dtype))
    register(op, pick_in_jax)
    x = torch.randn(3, 4, 5)
    compiled = compile_(lambda x, keepdim: op(x, [0, 2], keepdim, torch.float32, "total"))
    with recorder.expect(compiles=2, eager_ops=0):
        for keepdim in (True, False):
            assert_close(compiled(x, keepdim), x.sum([0, 2], keepdim=keepdim))
    assert seen == [([0, 2], keepdim, torch.float32, "total") for keepdim in (True, False)]


def test_several_results_and_absent_tensors(new_op: Any, recorder: Recorder) -> None:
    def both(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (x.clone() if bias is None else x + bias), x.argmax(-1)

    def both_in_jax(x: Any, bias: Any = None) -> Any:
        with jax.enable_x64(True):
            return (x if bias is None else x + bias), jnp.argmax(x, -1).astype(jnp.int64)

    op = new_op(both, lambda x, bias=None: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.int64)))
    register(op, both_in_jax)
    x, bias = torch.randn(2, 3, 4)
    with recorder.expect(compiles=2, eager_ops=0):
        for args in ((x,), (x, bias)):
            torch._dynamo.reset()
            for result, expected in zip(compile_(lambda *args: op(*args))(*args), both(*args), strict=True):
                assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_dtypes_arrive_as_they_are(new_op: Any, recorder: Recorder, dtype: torch.dtype) -> None:
    op = new_op(identity)
    seen = []
    register(op, lambda x: seen.append(x.dtype) or x)  # type: ignore[func-returns-value]
    x = torch.randn(3).to(dtype)
    with recorder.expect(compiles=1, eager_ops=0):
        assert_close(compile_(lambda x: op(x))(x), x)
    assert [f"torch.{found}" for found in seen] == [str(dtype)]


def test_elementwise_ops_run_in_buckets(new_op: Any, recorder: Recorder) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax, pad_rule="elementwise")
    compiled = compile_(lambda x, y: op(x, y, 2.0).sum(0), dynamic=True)
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (13, 14, 16):
            x, y = torch.randn(2, size, 3)
            assert_close(compiled(x, y), scaled_tanh(x, y, 2.0).sum(0))


def test_without_a_pad_rule_shapes_are_exact_and_the_reason_names_the_op(new_op: Any, recorder: Recorder) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax)
    compiled = compile_(lambda x, y: op(x, y), dynamic=True)
    with recorder.expect(compiles=3, eager_ops=0):
        for size in (5, 6, 7):
            x, y = torch.randn(2, size, 3)
            assert_close(compiled(x, y), scaled_tanh(x, y))
    assert str(op._opoverload) in recorder.snapshot().exact_shapes[-1]


def test_an_op_of_atens_arguments_takes_atens_pad_rule(new_op: Any, recorder: Recorder) -> None:
    def softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
        return torch.softmax(self, dim)

    op = new_op(softmax)
    register(op, lambda self, dim, half_to_float=False: jax.nn.softmax(self, dim), pad_rule="softmax")
    compiled = compile_(lambda x: op(x, 0), dynamic=True)
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (9, 12, 16):
            x = torch.randn(size, 3)
            assert_close(compiled(x), torch.softmax(x, 0))


def test_a_norm_runs_in_buckets(new_op: Any, recorder: Recorder) -> None:
    def norm(input: Tensor, normalized_shape: list[int], weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, 1e-5)

    def norm_in_jax(input: Any, normalized_shape: Any, weight: Any) -> Any:
        return input * jax.lax.rsqrt((input * input).mean(-1, keepdims=True) + 1e-5) * weight

    op = new_op(norm)
    register(op, norm_in_jax, pad_rule="layer_norm")
    weight = torch.randn(8)
    compiled = compile_(lambda x: op(x / x.sum(-1, keepdim=True), [8], weight))
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (13, 14, 16):
            x = torch.randn(2, size, 8)
            dynaxla.mark_bucketed(x, 1)
            assert_close(compiled(x), norm(x / x.sum(-1, keepdim=True), [8], weight))


@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_gives_eagers_gradients(new_op: Any, recorder: Recorder, dynamic: bool) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax, backward=scaled_tanh_backward, pad_rule="elementwise")
    compiled = compile_(lambda x, y: op(x.sin(), y, 2.0).exp(), dynamic=dynamic)
    with recorder.expect(compiles=2 if dynamic else 6, eager_ops=0):
        for size in (9, 12, 16):
            inputs = torch.randn(2, size, 3).unbind()
            mine, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
            compiled(*mine).sum().backward()
            scaled_tanh(theirs[0].sin(), theirs[1], 2.0).exp().sum().backward()
            for x, y in zip(mine, theirs, strict=True):
                assert_close(x.grad, y.grad)


def test_backward_holds_in_eager_too(new_op: Any) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax, backward=scaled_tanh_backward)
    for dtype in (torch.float32, torch.float64):
        x, y = (v.requires_grad_() for v in torch.randn(2, 4, 3, dtype=dtype).mT.unbind())
        found = torch.autograd.grad(op(x, y, 3.0).sum(), (x, y))
        for one, other in zip(found, torch.autograd.grad(scaled_tanh(x, y, 3.0).sum(), (x, y)), strict=True):
            assert_close(one, other)


def test_backward_of_several_results_keywords_and_integers(new_op: Any, recorder: Recorder) -> None:
    def pick(x: Tensor, places: Tensor, other: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        rows = x[places] * scale
        return rows, rows.exp() if other is None else rows * other

    def pick_in_jax(x: Any, places: Any, other: Any = None, *, scale: float = 1.0) -> Any:
        rows = x[places] * scale
        return rows, jnp.exp(rows) if other is None else rows * other

    def backward(cotangents: Any, x: Any, places: Any, other: Any = None, *, scale: float = 1.0) -> Any:
        given = [x] if other is None else [x, other]
        _, pull_back = jax.vjp(lambda x, *other: pick_in_jax(x, places, *other, scale=scale), *given)
        found = pull_back(tuple(cotangents))
        return (found[0], None) if other is None else (found[0], None, found[1])

    op = new_op(pick, lambda x, places, other=None, *, scale=1.0: (x[places], x[places]))
    register(op, pick_in_jax, backward=backward)
    places = torch.tensor([2, 0, 2])
    for other in (None, torch.randn(3, 4)):
        torch._dynamo.reset()

        def loss(function: Any, x: Tensor, other: Any = other) -> Tensor:
            first, second = function(x, places, other, scale=0.5)
            total: Tensor = (first * 2).sum() + second.sum()
            return total

        x = torch.randn(5, 4, requires_grad=True)
        with recorder.expect(compiles=2, eager_ops=0):
            (found,) = torch.autograd.grad(compile_(loss)(op, x), x)
        assert_close(found, torch.autograd.grad(loss(pick, x), x)[0])


def test_a_formula_of_the_users_is_kept(new_op: Any, recorder: Recorder) -> None:
    op = new_op(sine)
    op.register_autograd(lambda ctx, grad: grad * 7)
    register(op, jnp.sin)
    x = torch.randn(3, requires_grad=True)
    with recorder.expect(compiles=2, eager_ops=0):
        compile_(lambda x: op(x))(x).sum().backward()
    assert_close(x.grad, torch.full((3,), 7.0))
    with pytest.raises(OptionError, match="autograd formula already"):
        register(op, jnp.sin, backward=lambda cotangent, x: cotangent, replace=True)


def test_a_dtype_that_is_not_taken_runs_in_eager(new_op: Any, recorder: Recorder) -> None:
    op = new_op(scaled_tanh)
    register(op, scaled_tanh_in_jax, dtypes=[torch.float32])
    x, y = torch.randn(2, 3, dtype=torch.float64)
    with recorder.expect(eager_ops=1):
        assert_close(compile_(lambda x, y: op(x, y))(x, y), scaled_tanh(x, y))
    assert "unsupported_dtype; dtype torch.float64" in recorder.snapshot().fallbacks[-1]
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="unsupported_dtype"):
        compile_(lambda x, y: op(x, y), fallback="error")(x, y)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x[:2], r"gives float32\[2\] as result 0, torch gives f32\[3\]"),
        (lambda x: x.astype(jnp.int32), r"gives int32\[3\] as result 0, torch gives f32\[3\]"),
        (lambda x: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: 1, "raised TypeError"),
    ],
)
def test_a_wrong_function_is_a_link_error_that_names_both(
    new_op: Any, recorder: Recorder, function: Any, said: str
) -> None:
    op = new_op(identity)
    register(op, function)
    x = torch.randn(3)
    with recorder.expect(compiles=1):
        assert_close(compile_(lambda x: op(x) + 1)(x), x + 1)
    told = recorder.snapshot().fallbacks[-1]
    assert "link_failed" in told
    assert str(op._opoverload) in told
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=said):
        compile_(lambda x: op(x) + 1, fallback="error")(x)


def test_a_wrong_number_of_results(new_op: Any) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    op = new_op(two, lambda x: (torch.empty_like(x), torch.empty_like(x)))
    register(op, lambda x: (x, x, x))
    with pytest.raises(UnsupportedError, match="gives 3 results, torch gives 2"):
        compile_(lambda x: op(x), fallback="error")(torch.randn(3))


def test_what_cannot_be_registered(new_op: Any) -> None:
    op = new_op(identity)
    with pytest.raises(OptionError, match="name the overload"):
        dynaxla.register_lowering(torch.ops.aten.relu, jnp.abs)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="overload"):
        dynaxla.register_lowering(op, jnp.abs)
    with pytest.raises(OptionError, match="did you mean 'elementwise'"):
        register(op, jnp.abs, pad_rule="elementwize")
    with pytest.raises(OptionError, match="no pad rule 'mean' for kernels"):  # it would compute a mean itself
        register(op, jnp.abs, pad_rule="mean")
    with pytest.raises(OptionError, match="changes or aliases"):
        dynaxla.register_lowering(torch.ops.aten.relu_.default, jnp.abs)
    with pytest.raises(OptionError, match="made of other operators"):
        dynaxla.register_lowering(torch.ops.aten.einsum.default, jnp.einsum, replace=True)
    with pytest.raises(OptionError, match="autograd formula already"):
        dynaxla.register_lowering(torch.ops.aten.erfinv.default, jnp.abs, backward=lambda c, x: c, replace=True)


def test_lists_of_tensors_have_no_backward() -> None:
    def total(xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).sum(0)

    op = torch.library.custom_op("door_tests::total", total, mutates_args=())
    with pytest.raises(OptionError, match="takes xs as"):
        register(op, lambda xs: sum(xs), backward=lambda cotangent, xs: [cotangent] * len(xs))


def test_a_second_lowering_needs_replace(new_op: Any) -> None:
    op = new_op(identity)
    register(op, lambda x: x, backward=lambda cotangent, x: cotangent)
    with pytest.raises(OptionError, match="has a lowering already"):
        register(op, lambda x: x + 1)
    x = torch.randn(3)
    assert_close(compile_(lambda x: op(x))(x), x)
    register(op, lambda x: x + 1, backward=lambda cotangent, x: 5 * cotangent, replace=True)
    torch._dynamo.reset()
    x.requires_grad_()
    result = compile_(lambda x: op(x))(x)
    assert_close(result, x + 1)
    result.sum().backward()
    assert_close(x.grad, torch.full((3,), 5.0))


def test_the_packages_own_rows_are_replaced_only_if_asked() -> None:
    with pytest.raises(OptionError, match="replace=True"):
        dynaxla.register_lowering(torch.ops.aten.relu.default, jnp.abs)


def test_a_table_is_read_only() -> None:
    record = Record(torch.ops.aten.relu.default, jnp.abs)
    none = OpTable()
    one = none.with_records([record])
    assert not none.records
    assert one.bodies == {record.target: jnp.abs}
    with pytest.raises(TypeError):
        one.records[record.target] = record  # type: ignore[index]


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLE))
    names["main"]()
    said = capsys.readouterr().out
    assert "4 executables for 4 sizes, forward and backward; 0 ops in eager" in said
    assert ("for a TPU v5e" in said) == (importlib.util.find_spec("libtpu") is not None)


def test_the_examples_kernel_is_a_real_one_on_a_tpu() -> None:
    names = runpy.run_path(str(EXAMPLE))
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    texts = {
        platform: jax.jit(names["gate_in_jax"]).trace(x, x).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu")
    }
    assert "tpu_custom_call" in texts["tpu"]
    assert "custom_call" not in texts["cpu"]
