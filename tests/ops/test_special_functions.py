"""Bessel and Airy functions and orthogonal polynomials, against eager, and through torch.compile without an eager part."""

from __future__ import annotations

import math
from typing import Any

import pytest
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
