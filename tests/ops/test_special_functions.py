"""Bessel and Airy functions and orthogonal polynomials, against eager, and through torch.compile without an eager part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from dynaxla.observe.recorder import Recorder
from tests.ops.rule_check import run_rule, to_torch
from tests.tolerances import assert_close

aten = torch.ops.aten

BESSEL = [
    aten.special_bessel_j0,
    aten.special_bessel_j1,
    aten.special_bessel_y0,
    aten.special_bessel_y1,
    aten.special_modified_bessel_k0,
    aten.special_modified_bessel_k1,
    aten.special_scaled_modified_bessel_k0,
    aten.special_scaled_modified_bessel_k1,
    aten.special_spherical_bessel_j0,
    aten.special_airy_ai,
]
POLYNOMIALS = [
    aten.special_chebyshev_polynomial_t,
    aten.special_chebyshev_polynomial_u,
    aten.special_chebyshev_polynomial_v,
    aten.special_chebyshev_polynomial_w,
    aten.special_shifted_chebyshev_polynomial_t,
    aten.special_shifted_chebyshev_polynomial_u,
    aten.special_shifted_chebyshev_polynomial_v,
    aten.special_shifted_chebyshev_polynomial_w,
    aten.special_hermite_polynomial_h,
    aten.special_hermite_polynomial_he,
    aten.special_laguerre_polynomial_l,
    aten.special_legendre_polynomial_p,
]
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-6, -1e-6, 5.0, 2.0, -2.09, 2.09, 8.3203353, 103.892, 104.0]
NEARNESS = {torch.float32: 2e-6, torch.float64: 1e-12}


def assert_each_close(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> None:
    """Asserts equal patterns of NaN and infinity, and for every other element closeness relative to `scale`."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[expected.isinf()], expected[expected.isinf()])
    tiny = torch.finfo(actual.dtype).tiny  # what is smaller counts as zero
    off, allowed = (actual - expected).abs(), NEARNESS[actual.dtype] * scale + tiny
    assert not (off > allowed).any(), (off / allowed).nan_to_num().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", BESSEL, ids=str)
def test_bessel_functions(function: Any, dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(ODD), torch.linspace(-30, 110, 3001)]).to(dtype)
    expected = function.default(x)
    moved = function.default(x.double() * (1 + 2 * NEARNESS[dtype])) - function.default(x.double())
    scale = expected.abs() + moved.abs().nan_to_num() / NEARNESS[dtype]  # waves are as exact as their angles
    assert_each_close(to_torch(run_rule(function.default, (x,), {})), expected, scale.to(dtype))


def test_bessel_functions_of_integers() -> None:
    x = torch.arange(-3, 9)
    for function in BESSEL:
        assert_close(to_torch(run_rule(function.default, (x,), {})), function.default(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", POLYNOMIALS, ids=str)
def test_polynomials(function: Any, dtype: torch.dtype) -> None:
    """Degrees above six between -1 and 1 are turned angles; outside, numbers grow to infinity."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 0.25, -0.3, 0.77, 1.5, -2.5, 7.0, 1e20], dtype=dtype)[:, None]
    n = torch.tensor([-2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 31, 200, 600], dtype=dtype)
    actual, expected = to_torch(run_rule(function.default, (x, n), {})), function.default(x, n)
    inside = torch.where(x.abs() <= 1, 10 * (1 + n.abs()) ** 2, 0)  # roundings on the way grow with the degree
    assert_each_close(actual, expected, torch.maximum((1 + n.abs()) * expected.abs(), inside))


@pytest.mark.parametrize("function", POLYNOMIALS, ids=str)
def test_degrees_that_are_no_whole_numbers(function: Any) -> None:
    x, n = torch.tensor([0.3, 1.7]), torch.tensor([[2.9], [-0.5], [math.nan], [math.inf], [-math.inf]])
    assert_close(to_torch(run_rule(function.default, (x, n), {})), function.default(x, n))
    assert_close(to_torch(run_rule(function.n_scalar, (x, 3), {})), function.n_scalar(x, 3))
    whole = torch.tensor([0, 2, 5])
    assert_close(to_torch(run_rule(function.x_scalar, (0.3, whole), {})), function.x_scalar(0.3, whole))


def test_special_functions_need_no_eager_part(recorder: Recorder) -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        special = torch.special
        polynomials = special.chebyshev_polynomial_t(x, 3), special.legendre_polynomial_p(x, n)
        return [special.bessel_j0(x), special.airy_ai(x), *polynomials]

    args = torch.linspace(-1, 9, 12), torch.arange(12)
    with recorder.expect(eager_ops=0):
        actual = torch.compile(function, backend="dynaxla", fullgraph=True)(*args)
    for mine, eager in zip(actual, function(*args), strict=True):
        assert_close(mine, eager)


GAMMAS = {aten.igamma: scipy.special.gammainc, aten.igammac: scipy.special.gammaincc}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", GAMMAS, ids=str)
def test_incomplete_gamma_functions(function: Any, dtype: torch.dtype) -> None:
    """From where the series is exact in float32 to where neither series nor continued fraction is in float64."""
    scales = torch.tensor([10.0**k for k in range(-3, 11)], dtype=torch.float64)
    deviations = torch.tensor([-3.0, -1.0, -1e-3, 0.0, 0.5, 2.0], dtype=torch.float64)
    a = scales[:, None].expand(-1, len(deviations)).to(dtype).flatten()
    x = (scales[:, None] + deviations * scales[:, None].sqrt()).abs().to(dtype).flatten()
    expected = torch.from_numpy(GAMMAS[function](a.double().numpy(), x.double().numpy())).to(dtype)
    actual = to_torch(run_rule(function.default, (a, x), {}))
    torch.testing.assert_close(actual, expected, rtol=1e-6 if dtype is torch.float32 else 1e-9, atol=0)


@pytest.mark.parametrize("function", GAMMAS, ids=str)
def test_edges_of_incomplete_gamma_functions(function: Any) -> None:
    edges = torch.tensor([0.0, 1e-3, 1.0, 1e3, 1e5, -1.0, math.inf, -math.inf, math.nan])
    a, x = torch.meshgrid(edges, edges, indexing="ij")
    actual = to_torch(run_rule(function.default, (a, x), {}))
    torch.testing.assert_close(actual, function.default(a, x), equal_nan=True)


PARTS = [0.0, -0.0, 0.5, -0.5, 1.0, -2.0, 1e3, -1e3]
CUT = [aten.sqrt, aten.rsqrt, aten.log, aten.log1p, aten.asin, aten.acos, aten.atan, aten.asinh, aten.acosh, aten.atanh]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("function", CUT, ids=str)
def test_zeros_on_branch_cuts_have_a_sign(function: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([complex(real, imag) for real in PARTS for imag in PARTS], dtype=dtype)
    expected = torch.tensor(
        [function.default(each) for each in x], dtype=dtype
    )  # of one element, as vectors may differ
    actual = to_torch(run_rule(function.default, (x,), {}))
    is_number = torch.isfinite(torch.view_as_real(expected)).all(-1)
    torch.testing.assert_close(actual[is_number], expected[is_number], rtol=1e-4, atol=1e-5)


def test_exponentials_of_complex_infinities() -> None:
    parts = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0)
    x = torch.tensor([complex(real, imag) for real in (math.inf, -math.inf) for imag in parts])
    for function in (aten.exp, aten.exp2):
        with np.errstate(invalid="ignore"):
            expected = torch.from_numpy(np.exp(x.numpy()))
        torch.testing.assert_close(to_torch(run_rule(function.default, (x,), {})), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_number_of_an_infinite_part_is_infinitely_large(dtype: torch.dtype) -> None:
    parts = (0.0, -0.0, math.inf, -math.inf, math.nan, 3.0)
    x = torch.tensor([complex(real, imag) for real in parts for imag in parts], dtype=dtype)
    assert_close(to_torch(run_rule(aten.abs.default, (x,), {})), x.abs())
    compiled = torch.compile(torch.abs, backend="dynaxla", dynamic=True)
    assert_close(compiled(x), x.abs())


def test_an_arc_tangent_of_nan_is_nan() -> None:
    x = torch.tensor([complex(math.nan, imag) for imag in (0.0, math.inf, 1.0)])
    assert to_torch(run_rule(aten.atan.default, (x,), {})).real.isnan().all()
    assert to_torch(run_rule(aten.atanh.default, (x * 1j,), {})).imag.isnan().all()


def test_exponential_units_keep_the_digits_of_small_numbers() -> None:
    x = torch.tensor([-1e-3, -1e-5, -1e-7, -1e-9])
    for unit in (torch.nn.functional.elu, torch.nn.functional.celu, torch.nn.functional.selu):
        found = torch.compile(unit, backend="dynaxla")(x)
        torch.testing.assert_close(found, unit(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_sign_is_copied_to_the_least_number(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.iinfo(dtype).min, -3, 3], dtype=dtype)
    for sign in (torch.tensor(1, dtype=dtype), torch.tensor(-1, dtype=dtype), 2.0):
        found = torch.compile(lambda x, sign=sign: torch.copysign(x, sign), backend="dynaxla")(x)
        assert torch.equal(found, torch.copysign(x, sign))


def test_degrees_are_made_by_all_digits_of_pi() -> None:
    x = torch.randn(1000)
    found = torch.compile(torch.rad2deg, backend="dynaxla")(x)
    torch.testing.assert_close(found, torch.rad2deg(x), rtol=1.2e-7, atol=0)
