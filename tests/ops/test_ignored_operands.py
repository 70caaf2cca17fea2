"""Operands that eager ignores because of a number or a mask: NaN and infinity in them do not count, nor in gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import dynaxla
from conformance.mlir_run import Lowering
from conformance.op_calls import Call
from conformance.rare_calls import rare_calls
from dynaxla.ops.table import core_table
from tests.lists import quick
from tests.tolerances import assert_close

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASK = torch.tensor([True, False, True, False])
LABELS, PLACES = torch.tensor([-100, 1, 3, 1]), torch.tensor([[0, 0, 1, 1]] * 4)

SUMS: dict[str, Function] = {
    "addmm beta": lambda bad, x, y: torch.addmm(bad, x, y, beta=0),
    "addmm bias": lambda bad, x, y: torch.addmm(bad[0], x, y, beta=0, alpha=0.5),
    "addmm_": lambda bad, x, y: bad.clone().addmm_(x, y, beta=0),
    "addmm alpha": lambda bad, x, y: torch.addmm(x, bad, y, alpha=0),
    "addmm both": lambda bad, x, y: torch.addmm(bad, bad, y, alpha=0, beta=0),
    "baddbmm beta": lambda bad, x, y: torch.baddbmm(bad[None], x[None], y[None], beta=0),
    "baddbmm_": lambda bad, x, y: bad[None].clone().baddbmm_(x[None], y[None], beta=0),
    "baddbmm alpha": lambda bad, x, y: torch.baddbmm(x[None], bad[None], y[None], alpha=0),
    "addbmm beta": lambda bad, x, y: torch.addbmm(bad, x[None], y[None], beta=0),
    "addbmm alpha": lambda bad, x, y: torch.addbmm(x, bad[None], y[None], alpha=0),
    "addmv beta": lambda bad, x, y: torch.addmv(bad[0], x, y[0], beta=0),
    "addmv alpha": lambda bad, x, y: torch.addmv(x[0], bad, y[0], alpha=0),
    "addr beta": lambda bad, x, y: torch.addr(bad, x[0], y[0], beta=0),
    "addr alpha": lambda bad, x, y: torch.addr(x, bad[0], y[0], alpha=0),
    "_addmm_activation": lambda bad, x, y: torch._addmm_activation(x[0], bad, y, alpha=0),
}
OTHERS: dict[str, Function] = {
    "add": lambda bad, x, y: torch.add(x, bad, alpha=0),
    "addcmul": lambda bad, x, y: torch.addcmul(x, bad, y, value=0),
    "addcdiv": lambda bad, x, y: torch.addcdiv(x, bad, y, value=0),
    "lerp start": lambda bad, x, y: torch.lerp(bad, x, 1.0),
    "lerp end": lambda bad, x, y: torch.lerp(x, bad, 0.0),
    "dropout of all": lambda bad, x, y: F.dropout(bad, 1.0),
    "dropout of none": lambda bad, x, y: F.dropout(bad, 0.0),
    "where": lambda bad, x, y: torch.where(MASK, x, torch.where(MASK, bad, y)),
    "masked_fill": lambda bad, x, y: torch.where(MASK, bad, x).masked_fill(MASK, 0),
    "clamp": lambda bad, x, y: bad.clamp(-1, 1),
    "threshold": lambda bad, x, y: F.threshold(bad, 0.0, 1.0),
    "nansum": lambda bad, x, y: torch.where(MASK, bad, x).nansum(1),
    "pad": lambda bad, x, y: F.pad(torch.cat([bad, x]), (0, 0, -4, 2)),
    "cumprod": lambda bad, x, y: torch.cumprod(torch.cat([0 * x, bad]), 0),
    **{
        f"scatter_reduce {name}": lambda bad, x, y, n=name: bad.scatter_reduce(1, PLACES, x, n, include_self=False)
        for name in ("sum", "prod", "mean", "amax", "amin")
    },
    **{
        f"index_reduce {name}": lambda bad, x, y, n=name: bad.index_reduce(1, PLACES[0], x, n, include_self=False)
        for name in ("prod", "mean", "amax", "amin")
    },
    "nll_loss": lambda bad, x, y: F.nll_loss(torch.cat([bad[:1], x[1:]]), LABELS),
    "cross_entropy": lambda bad, x, y: F.cross_entropy(torch.cat([bad[:1], x[1:]]), LABELS),
    "cross_entropy weight": lambda bad, x, y: F.cross_entropy(x, LABELS, bad[0].where(MASK, x[0].abs())),
    "xlogy": lambda bad, x, y: torch.xlogy(0 * x, bad),
    "pow": lambda bad, x, y: bad**0,
    "empty": lambda bad, x, y: torch.bmm(bad[None, :, :0], bad[None, :0]),
    "attention": lambda bad, x, y: F.scaled_dot_product_attention(
        x[None], torch.cat([bad[:1], x[1:]])[None], y[None], torch.arange(4).gt(0).expand(4, 4)
    ),
}


NOT_DERIVED = ("_addmm_activation", "cross_entropy weight")
"""Functions of which torch has no derivative, or none by the ignored operand."""


def _run(functions: dict[str, Function], operands: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    found = {}
    for name, function in functions.items():
        given = [x.clone().requires_grad_() for x in operands]
        out = function(*given)
        gradients = torch.autograd.grad(out.sum(), given, allow_unused=True) if out.requires_grad else ()
        found[name] = [out.detach(), *(x for x in gradients if x is not None)]
    return found


def _operands(dtype: torch.dtype, value: float, size: int = 4) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.full((size, 4), value, dtype=dtype), torch.randn(size, 4).to(dtype), torch.randn(4, 4).to(dtype)


def _assert_same(mine: dict[str, list[Tensor]], eager: dict[str, list[Tensor]]) -> None:
    for name, wanted in eager.items():
        for a, b in zip(mine[name], wanted, strict=True):
            try:
                assert_close(a.cpu(), b)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("functions", [SUMS, OTHERS], ids=["sums", "others"])
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32), ids=str)
def test_forward(functions: dict[str, Function], dtype: torch.dtype) -> None:
    def run(bad: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: function(bad, x, y) for name, function in functions.items()}

    compiled = torch.compile(run, backend="dynaxla", dynamic=False)
    for value in (math.nan, math.inf):
        bad, x, y = _operands(dtype, value)
        eager = {name: [out] for name, out in run(bad, x, y).items()}
        _assert_same({name: [out] for name, out in compiled(bad, x, y).items()}, eager)


@pytest.mark.parametrize("functions", [SUMS, OTHERS], ids=["sums", "others"])
def test_gradients(functions: dict[str, Function]) -> None:
    functions = {name: each for name, each in functions.items() if name not in NOT_DERIVED}
    operands = _operands(torch.float32, math.nan)
    compiled = torch.compile(lambda *given: _run(functions, given), backend="dynaxla", dynamic=False)
    _assert_same(compiled(*operands), _run(functions, operands))


def test_rows_that_vary() -> None:
    def run(bad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.addmm(bad, x, y, beta=0), torch.addmm(x, bad, y, alpha=0), torch.addmm(bad[0], x, y, beta=0)

    compiled = torch.compile(run, backend="dynaxla", dynamic=True)
    for size in (4, 7, 33):
        operands = _operands(torch.float32, math.nan, size)
        for mine, wanted in zip(compiled(*operands), run(*operands), strict=True):
            assert_close(mine, wanted)


def test_on_the_device() -> None:
    dynaxla.use("cpu")
    operands = _operands(torch.float32, math.nan)
    on_device = tuple(x.to("dynaxla") for x in operands)
    for function in SUMS.values():
        assert_close(function(*on_device).cpu(), function(*operands))


@pytest.mark.parametrize("by_body", [True, False], ids=["body", "torch-mlir"])
def test_who_lowers(by_body: bool) -> None:
    """Of these ops both ways ignore the operand; of addmm and baddbmm torch-mlir's does not, and the records say so."""
    targets = [aten.addmv.default, aten.addr.default, aten.lerp.Scalar]
    bound = [aten.addmm.default, aten.baddbmm.default]
    calls = []
    for target, args in rare_calls([*targets, *(bound if by_body else [])]):
        positional, named = (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})
        if positional[0].dtype is torch.float32:
            leaves, treespec = pytree.tree_flatten((positional, named))
            calls.append(Call(target, tuple(leaves), treespec))
    lowering = Lowering(core_table().bodies, core_table().forms)
    for call, (mine,) in zip(calls, lowering.run(calls, by_body=by_body), strict=True):
        assert_close(mine, call.run())
