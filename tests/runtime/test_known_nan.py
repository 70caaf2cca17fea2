"""NaN that XLA's CPU compiler knows while it compiles stays NaN in exponentials."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dynaxla.runtime.known_nan import loses_nan
from tests.lists import quick
from tests.tolerances import assert_close

Function = Callable[[torch.Tensor], torch.Tensor]

KNOWN: dict[str, Function] = {
    "a product": lambda x: x * torch.nan,
    "a filled tensor": lambda x: x + torch.full_like(x, torch.nan),
    "the mean of nothing": lambda x: x + x[:0].mean(),
    "a choice for all": lambda x: torch.where((x.abs().sum() > 0), torch.nan, x),
    "infinity less infinity": lambda x: x + (torch.full((4,), torch.inf).to(x.dtype) - torch.inf),
    "logarithms of indices": lambda x: x + torch.arange(-2, 2).to(x.dtype).log(),
    "the logarithm of -1": lambda x: x + torch.full((4,), -1.0).to(x.dtype).log(),
}

EXPONENTIALS: dict[str, Function] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sinh": torch.sinh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "softplus": F.softplus,
    "i0": torch.special.i0,
    "a power": lambda x: x**1.7,
    "a sum": lambda x: x.exp().sum(-1),
}


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.float64, torch.bfloat16, torch.float16], torch.float32))
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", quick(EXPONENTIALS, "exp"))
def test_an_exponential_of_nan(name: str, known: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return EXPONENTIALS[name](KNOWN[known](x)), EXPONENTIALS[name](x)

    x = torch.randn(8, 4).to(dtype)
    for mine, eager in zip(torch.compile(function, backend="dynaxla")(x), function(x), strict=True):
        assert_close(mine, eager)


@pytest.mark.parametrize("known", [torch.nan, complex(torch.nan, 1), complex(1, torch.nan)])
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, lambda x: x**2.5])
def test_a_complex_exponential_of_nan(function: Function, known: complex) -> None:
    x = torch.randn(16, dtype=torch.complex64)
    found = torch.compile(lambda x: function(x * known), backend="dynaxla")(x)
    assert torch.equal(found.isnan(), function(x * known).isnan())


def test_a_kept_executable_keeps_nan() -> None:
    x = torch.randn(8, 4)
    for _ in range(2):
        torch._dynamo.reset()
        assert torch.compile(lambda x: torch.exp(x * torch.nan), backend="dynaxla")(x).isnan().all()


def _computation(*lines: str) -> str:
    text = "".join(f"  {line}\n" for line in ("p = f32[4]{0} parameter(0)", *lines))
    return f"HloModule m\n\nfused {{\n{text}}}\n\n"


def test_programs_that_lose_nan_are_told_apart() -> None:
    exponential = "ROOT e = f32[4]{0} exponential(p)"
    losing = (
        _computation("c = f32[] constant(nan)", exponential),
        _computation("c = f32[2]{0} constant({1, -nan})", "ROOT e = bf16[4]{0} logistic(p)"),
        _computation("c = c64[2]{0} constant({(1, 0), (0, nan)})", exponential),
        _computation(
            "i = f32[4]{0} iota(), iota_dimension=0", "n = f32[4]{0} negate(i)", "l = f32[4]{0} log(n)", exponential
        ),
    )
    keeping = (
        _computation("c = f32[] constant(1)", exponential),
        _computation("l = f32[4]{0} log(p)", exponential),
        _computation("c = f32[] constant(nan)", "ROOT s = f32[4]{0} sine(p)"),
        _computation("c = f32[] constant(nan)") + _computation(exponential),
    )
    assert all(map(loses_nan, losing))
    assert not any(map(loses_nan, keeping))
