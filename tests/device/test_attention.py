"""`scaled_dot_product_attention` in compiled functions of tensors of the device: one op, with the numbers of the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dynaxla.decompositions import fused_attention
from tests.tolerances import assert_close

MASK = torch.tensor([[True, False, True, True, False], [True] * 5])[:, None, None]


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled by each attention that is one op."""
    found: list[int] = []
    run = fused_attention._attend_at_once

    def count(*args: Any, **kwargs: Any) -> Any:
        found.append(len(args))
        return run(*args, **kwargs)

    monkeypatch.setattr(fused_attention, "_attend_at_once", count)
    return found


def check(function: Any, *shapes: tuple[int, ...], mask: Any = None, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=dtype) for shape in shapes]
    results = []
    for device, called in (("cpu", function), ("dynaxla", torch.compile(function, backend="dynaxla"))):
        operands = [each.detach().clone().to(device).requires_grad_() for each in given]
        result = called(*operands, *([] if mask is None else [mask.to(device)]))
        grads = torch.autograd.grad(result.square().sum(), operands)
        results.append([each.cpu() for each in (result.detach(), *grads)])
    for found, expected in zip(*reversed(results), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_one_op(attends: list[int], dtype: torch.dtype, is_causal: bool) -> None:
    check(partial(F.scaled_dot_product_attention, is_causal=is_causal), *[(2, 3, 5, 4)] * 3, dtype=dtype)
    assert attends


@pytest.mark.parametrize("mask", [MASK, MASK & False, torch.randn(2, 1, 5, 5)], ids=["bools", "nothing", "numbers"])
def test_masks(attends: list[int], mask: torch.Tensor) -> None:
    check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *[(2, 3, 5, 4)] * 3, mask=mask)
    assert attends


def test_heads_that_share_keys(attends: list[int]) -> None:
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    check(partial(F.scaled_dot_product_attention, enable_gqa=True, scale=0.3), *shapes)
    assert attends


@pytest.mark.parametrize(
    "shapes",
    [((3, 5, 4),) * 3, ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 6)), ((2, 3, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4))],
    ids=["three dims", "other values", "broadcast"],
)
def test_others_are_taken_apart(attends: list[int], shapes: Any) -> None:
    check(F.scaled_dot_product_attention, *shapes)
    assert not attends


def _tangent(*given: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(F.scaled_dot_product_attention, given, given)[1]


def _second_derivatives(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.func.jacfwd(torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).square().sum()))(q)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (torch.func.vmap(F.scaled_dot_product_attention), (2, 1, 2, 3, 4)),
        (_tangent, (1, 2, 3, 4)),
        (_second_derivatives, (1, 2, 3, 4)),
    ],
    ids=["vmap", "jvp", "second derivatives"],
)
def test_transforms_take_it_apart(attends: list[int], call: Any, shape: tuple[int, ...]) -> None:
    """The op of the CPU has no batching rule and no second derivatives."""
    given = [torch.randn(shape).double() for _ in range(3)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = call(*given)
    found = torch.compile(call, backend="dynaxla")(*(each.to("dynaxla") for each in given))
    assert_close(found.cpu(), expected)
    assert not attends


def test_a_mask_with_a_gradient(attends: list[int]) -> None:
    check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *[(2, 3, 5, 4)] * 3, (5, 5))
    assert not attends
