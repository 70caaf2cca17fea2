"""Small values far out: relative to themselves they are as exact as eager's, though absolutely they are next to nothing.

Not among them is what a single rounding decides, in eager too: 1 - tanh(x) ** 2 is all error at 8, the gradient of erfcx at 20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

POINTS = torch.tensor(
    [*(-80.0, -40, -30, -20, -16, -13.3, -12, -8, -4), *(4.0, 5.5, 8, 9.2, 9.3, 12, 16, 20, 30, 40, 72)]
)
AS_EXACT = 4
"""So many times eager's own distance from float64, beside a few roundings."""
ROUNDINGS = 16 * torch.finfo(torch.float32).eps
LEAST = 1e-30
"""Smaller values may be taken for 0, as XLA takes subnormal ones."""

Function = Callable[[Tensor], Tensor]

FUNCTIONS: Mapping[str, Function] = {
    **{name: getattr(F, name) for name in "sigmoid silu logsigmoid softplus elu selu celu tanhshrink gelu".split()},
    **{name: getattr(torch.special, name) for name in "expm1 erfc expit log_ndtr ndtr".split()},
    **{name: getattr(torch, name) for name in "exp atan asinh cosh sinh sinc rsqrt".split()},
    "log1p of exp": lambda x: torch.log1p(torch.exp(x)),
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "glu": lambda x: F.glu(torch.cat([torch.ones_like(x), x])),
    "softmax": lambda x: torch.stack([x, torch.zeros_like(x)]).softmax(0),
    "log_softmax": lambda x: torch.stack([x, torch.zeros_like(x)]).log_softmax(0),
    "logsumexp": lambda x: torch.stack([x, torch.zeros_like(x)]).logsumexp(0),
    "soft margin": lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
    "soft margin, summed": lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="sum"),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "cross entropy": lambda x: F.cross_entropy(
        torch.stack([x, torch.zeros_like(x)], 1), x.long() * 0, reduction="none"
    ),
    "multilabel soft margin": lambda x: F.multilabel_soft_margin_loss(
        x[:, None], torch.ones_like(x)[:, None], reduction="none"
    ),
    "poisson": lambda x: F.poisson_nll_loss(x, torch.zeros_like(x), reduction="none"),
}


def values(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """The results, and the gradients of their sum."""
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    result.sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def error(actual: Tensor, wide: Tensor) -> Tensor:
    """Relative to the wide values; 0 where these are next to nothing."""
    return ((actual.double() - wide).abs() / wide.abs()).where(wide.abs() > LEAST, 0).nan_to_num()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tails_are_as_exact_as_eagers(name: str) -> None:
    function = FUNCTIONS[name]
    found = values(torch.compile(function, backend="dynaxla"), POINTS)
    wide = values(function, POINTS.double())
    for mine, its, exact in zip(found, values(function, POINTS), wide, strict=True):
        allowed = AS_EXACT * error(its, exact) + ROUNDINGS
        off = error(mine, exact) - allowed
        assert off.max() <= 0, (mine, its)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_erfcx_has_no_gap_where_erfc_is_subnormal(dtype: torch.dtype) -> None:
    """From 9.19 and 26.54 on, up to where the exponential overflows."""
    x = torch.cat([torch.linspace(5, 30, 2001), torch.tensor([1e3, 1e9, torch.inf])]).to(dtype)
    found = torch.compile(torch.special.erfcx, backend="dynaxla")(x)
    assert error(found, torch.special.erfcx(x.double())).max() <= 32 * torch.finfo(dtype).eps
    below = torch.compile(torch.special.log_ndtr, backend="dynaxla")(-x[:-3])
    assert error(below, torch.special.log_ndtr(-x[:-3].double())).max() <= 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hyperbolic_functions_end_where_their_results_do(dtype: torch.dtype) -> None:
    """exp(x) overflows before the half of it does."""
    last = torch.tensor(torch.finfo(dtype).max, dtype=dtype).log() + 0.69
    x = torch.tensor([last, -last, last + 0.01, -last - 0.01, torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    sinh, cosh = (torch.compile(f, backend="dynaxla")(x) for f in (torch.sinh, torch.cosh))
    assert cosh.isinf().tolist() == sinh.isinf().tolist() == [False, False, True, True, True, True, False, False, False]
    assert cosh.isnan().tolist() == sinh.isnan().tolist() == x.isnan().tolist()
    assert torch.equal(sinh.signbit(), x.signbit())
    assert sinh[-1] == 0
    assert cosh[-1] == 1
