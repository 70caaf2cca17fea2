"""Rules that few models need, against eager, and through torch.compile without an eager part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from dynaxla.observe.recorder import Recorder
from tests.ops.rule_check import Call, assert_agrees, refusal, run_rules
from tests.tolerances import assert_close

aten = torch.ops.aten


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SAMPLES = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(5))
HOLED = randn(2, 3, 5, 7, 6).masked_fill(randn(2, 3, 5, 7, 6) > 1.5, math.nan)
POOLED = ([2, 3, 2], [3, 4, 3])  # windows, results
EDGES = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-3, 6e4, math.inf, -math.inf, math.nan])
MANY = torch.arange(-120, 130, 7)
CHOSEN = torch.tensor([[0, 2], [2, 4]])
TRUE_AND_FALSE = torch.tensor([0, 1, 1j, 1 + 1j, complex(math.nan, 0), complex(0, math.nan)])
CASES: list[tuple[OpOverload, tuple[Any, ...]]] = [
    *[(aten.logical_not.default, (TRUE_AND_FALSE.to(dtype),)) for dtype in (torch.complex64, torch.complex128)],
    *[
        (op.default, (TRUE_AND_FALSE, TRUE_AND_FALSE.flip(0)))
        for op in (aten.logical_and, aten.logical_or, aten.logical_xor)
    ],
    *[(aten.frexp.Tensor, (EDGES.to(dtype),)) for dtype in FLOATS],
    (aten._trilinear.default, (randn(3, 4), randn(5, 4, 2), randn(3, 2), [1, 3], [0], [1, 2], [2, 3])),
    (aten._trilinear.default, (randn(3, 4), randn(5, 4), randn(3, 5), [1], [0], [2], [])),
    (aten._trilinear.default, (randn(3, 4), randn(3, 4), randn(3, 4), [0], [0], [0], [1], 1)),
    (aten._trilinear.default, (randn(3, 4), randn(3, 4), randn(3, 4), [1], [1], [1], [1], 0)),
    (aten._trilinear.default, (randn(3, 4), randn(3, 4), randn(3, 4), [1], [1], [1], [1], 1)),
    *[(aten.embedding_renorm.default, (randn(5, 3), CHOSEN, 1.0, order)) for order in (2.0, 1.0, math.inf, 0.5)],
    (aten.embedding_renorm.default, (randn(5, 3, dtype=torch.bfloat16), CHOSEN, 0.5, 2.0)),
    *[
        (aten.lcm.default, (MANY.to(dtype), (MANY.flip(0) + 3).to(dtype)))
        for dtype in (torch.int8, torch.int16, torch.uint8)
    ],
    (
        aten.special_zeta.default,
        (torch.tensor([5000.0, 200.0, 1000.0, 3.0, 88.0]), torch.tensor([2.0, 3.0, 1.5, 2.0, 0.5])),
    ),
    (aten.masked_scatter_backward.default, (randn(4, 5), randn(4, 5) > 0, [3, 7])),
    (aten.masked_scatter_backward.default, (randn(4, 5), randn(5) > 0, [20])),
    *[(aten.fractional_max_pool3d.default, (x, *POOLED, SAMPLES)) for x in (HOLED, randn(2, 3, 5, 7, 6))],
    (aten.fractional_max_pool3d.default, (randn(3, 5, 7, 6).double(), *POOLED, SAMPLES[:1].double())),
    *[
        (aten.fractional_max_pool2d.default, (HOLED[..., 0], [kernel, 3], [count, 4], SAMPLES[..., :2]))
        for kernel, count in ((2, 3), (5, 1), (1, 5))
    ],
    (
        aten.fractional_max_pool2d_backward.default,
        (randn(0, 3, 2, 2), randn(0, 3, 5, 5), [2, 2], [2, 2], torch.zeros(0, 3, 2, 2, dtype=torch.int64)),
    ),
]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What the rules give, from one executable for all cases."""
    return run_rules([Call(target, args, {}, None) for target, args in CASES])


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)])
def test_rules_agree_with_eager(place: int, results: list[Any]) -> None:
    target, args = CASES[place]
    assert refusal(target, args, {}) is None
    assert_agrees(Call.of(target, *args), results[place])


@pytest.mark.parametrize("use_gelu", [False, True])
def test_an_activation_of_a_product(use_gelu: bool) -> None:
    """GELU is exact, as the CPU's kernel has it."""
    run = lambda x, a, b: torch._addmm_activation(x, a, b, beta=0.5, alpha=2, use_gelu=use_gelu)  # noqa: E731
    given = randn(4, 6), randn(4, 3), randn(3, 6) + 1
    assert_close(torch.compile(run, backend="dynaxla", options={"fallback": "error"})(*given), run(*given))


def bilinear(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.bilinear(x, y, randn(6, 4, 2), randn(6))


def test_a_bilinear_layer_needs_no_eager_part(recorder: Recorder) -> None:
    args = [randn(3, 4).requires_grad_(), randn(3, 2).requires_grad_()]
    expected = bilinear(*args)
    with recorder.expect(eager_ops=0):
        actual = torch.compile(bilinear, backend="dynaxla")(*args)
        gradients = torch.autograd.grad(actual.sin().sum(), args)
    assert_close(actual, expected)
    for mine, eager in zip(gradients, torch.autograd.grad(expected.sin().sum(), args), strict=True):
        assert_close(mine, eager)


def fractional_pools(x: torch.Tensor, y: torch.Tensor, samples: torch.Tensor) -> list[torch.Tensor]:
    pool = torch.nn.functional
    return [
        pool.fractional_max_pool2d(x, 2, output_size=(4, 3), _random_samples=samples[..., :2]),
        pool.fractional_max_pool3d(y, (2, 3, 2), output_ratio=(0.5, 0.6, 0.7), _random_samples=samples),
    ]


def test_fractional_pools_need_no_eager_part(recorder: Recorder) -> None:
    args = [randn(2, 3, 7, 6).requires_grad_(), randn(2, 3, 5, 7, 6).requires_grad_()]
    expected = fractional_pools(*args, SAMPLES)
    with recorder.expect(eager_ops=0):
        actual = torch.compile(fractional_pools, backend="dynaxla")(*args, SAMPLES)
        gradients = torch.autograd.grad([x.sin().sum() for x in actual], args)
    wanted = torch.autograd.grad([x.sin().sum() for x in expected], args)
    for mine, eager in zip([*actual, *gradients], [*expected, *wanted], strict=True):
        assert_close(mine, eager)


def test_an_uninitialized_tensor_has_the_layout_that_was_asked_for(recorder: Recorder) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_permuted((2, 3, 4), (2, 0, 1)).copy_(x)

    with recorder.expect(eager_ops=0):
        actual = torch.compile(function, backend="dynaxla", fullgraph=True)(randn(2, 3, 4))
    assert torch.equal(actual, randn(2, 3, 4))
    assert actual.stride() == function(randn(2, 3, 4)).stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["of the same dtype", "float32"])
def test_a_batch_norm_of_16_bits_trains_without_an_eager_part(
    dtype: torch.dtype, parameters: str, recorder: Recorder
) -> None:
    kept = torch.float32 if parameters == "float32" else dtype
    eager, inner = (torch.nn.BatchNorm2d(3).to(kept) for _ in range(2))
    compiled = torch.compile(inner, backend="dynaxla")
    x = randn(4, 3, 5, 5, dtype=dtype) * 2 + 1
    with recorder.expect(eager_ops=0):
        results = [(compiled(x), eager(x)) for _ in range(2)]
        for output in results[-1]:
            output.float().pow(3).sum().backward()
    assert_close(*results[-1])
    for name in ("running_mean", "running_var"):
        assert_close(getattr(inner, name), getattr(eager, name))
    assert_close(inner.weight.grad, eager.weight.grad)
    assert_close(inner.bias.grad, eager.bias.grad)


def test_frexp_needs_no_eager_part(recorder: Recorder) -> None:
    with recorder.expect(eager_ops=0):
        mantissa, exponent = torch.compile(torch.frexp, backend="dynaxla")(EDGES[:6])
    assert torch.equal(torch.ldexp(mantissa, exponent), EDGES[:6])
    assert (mantissa.dtype, exponent.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_ldexp_is_exact_whatever_the_power_is(dtype: torch.dtype) -> None:
    """Subnormal numbers count as zero (docs/precision.md), but those of float16, which is computed in float32."""
    tiny, distance = torch.finfo(dtype).tiny, {torch.float64: 2200, torch.float16: 60}.get(dtype, 290)
    least = 0.0 if dtype is torch.float16 else tiny * 1.01
    exponent = torch.randint(-distance, distance, (4000,))
    x = torch.ldexp(randn(4000, dtype=torch.float64), torch.randint(-distance // 2, distance // 2, (4000,))).to(dtype)
    x = torch.where(x.abs() < least, 0, x)
    x[:7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 3.0])
    exponent[:5] = distance
    exponent[5:7] = torch.tensor([(1 << 33) - 3, -(1 << 31)])  # of which eager reads the last 32 bits
    expected = torch.ldexp(x, exponent)
    assert (expected.isinf() & x.isfinite()).any()
    assert ((expected == 0) & (x != 0)).any()
    found = torch.compile(torch.ldexp, backend="dynaxla", options={"fallback": "error"})(x, exponent)
    expected, found = (torch.where(each.abs() < least, each * 0, each) for each in (expected, found))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_powers_whose_factors_leave_the_range(dtype: torch.dtype) -> None:
    """The absolute value of a power is a product of two factors: one may be 0 and the other infinite."""
    scale = 100 if dtype is torch.complex64 else 1000
    base, exponent = (
        randn(2, 2000, dtype=torch.float64) * scale,
        randn(2, 4000, dtype=torch.float64)[:, ::2] * scale / 5,
    )
    base, exponent = (torch.complex(*each).to(dtype) for each in (base, exponent))
    base[:6] = torch.tensor([0, 0, 0, complex(math.inf, 1), -113 - 4.2j, 1e3])
    exponent[:6] = torch.tensor([0, 1 + 1j, -1 + 1j, 2, -51 + 113j, 1e3 + 1113j])
    expected = torch.pow(base, exponent)
    found = torch.compile(torch.pow, backend="dynaxla")(base, exponent)
    assert (expected.isfinite() & (expected != 0)).sum() > 100
    tiny = torch.finfo(dtype).tiny * 1e3
    told = (expected.abs() > tiny) | ~expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isfinite()[told], expected.isfinite()[told])
    finite = told & expected.isfinite()
    tolerance = 2e-3 if dtype is torch.complex64 else 1e-9
    torch.testing.assert_close(found[finite], expected[finite], rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lgamma_is_exact_around_its_zeros(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 1.0001, 0.9999, 2.0001, 1.9999, 1.15, 0.85, 2.19, 1.81, 1.25, 3, 0.1, -0.5, 50]).to(dtype)
    actual, exact = torch.compile(torch.lgamma, backend="dynaxla")(x), torch.lgamma(x.double())
    assert actual[:2].tolist() == [0, 0]
    # As exact as the zeros let it be: a sum of terms as large as the distance to the zero.
    torch.testing.assert_close(actual.double(), exact, rtol=16 * torch.finfo(dtype).eps, atol=0)
    whole = torch.compile(torch.lgamma, backend="dynaxla")(torch.tensor([1, 2, 3, 0]))
    assert_close(whole, torch.lgamma(torch.tensor([1, 2, 3, 0])))


def test_a_gradient_that_is_zero_everywhere_needs_no_eager_part(recorder: Recorder) -> None:
    x = randn(5).requires_grad_()
    with recorder.expect(eager_ops=0):
        torch.compile(torch.sgn, backend="dynaxla")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0] * 5


@pytest.mark.parametrize("upper", [False, True])
def test_a_cholesky_factor_is_compiled_and_checked(upper: bool, recorder: Recorder) -> None:
    x = randn(3, 4, 4)
    positive = x @ x.mT + torch.eye(4)
    compiled = torch.compile(lambda x: torch.cholesky(x, upper) * 2, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        assert_close(compiled(positive), torch.cholesky(positive, upper) * 2)
    with pytest.raises(torch.linalg.LinAlgError, match=r"^cholesky: \(Batch element 0\): The factorization"):
        compiled(-positive)
