"""Numbers of float8 in programs: stored, moved, chosen and converted, as by torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64)


def _places(w: Tensor) -> Tensor:
    return torch.tensor([1, 0, 1], device=w.device)


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "copy": lambda w: (w.clone(), w.t().contiguous()),
    "views": lambda w: (w.view(2, -1).clone(), w[1:, ::2].clone(), w.unsqueeze(0).expand(2, -1, -1).clone()),
    "bytes": lambda w: (w.view(torch.uint8), w.view(torch.uint8).view(w.dtype)),
    "joined": lambda w: (torch.cat([w, w]), torch.stack([w, w], 1), w.repeat(2, 1), w.roll(1, 0)),
    "parts": lambda w: (*(part.clone() for part in w.split(4, 1)), *(row.clone() for row in w.unbind(1))),
    "made": lambda w: (torch.zeros_like(w), torch.ones_like(w), w.new_full((2,), 3.25), w.new_zeros(3)),
    "rows": lambda w: (w[_places(w)], w.index_select(0, _places(w)), F.embedding(_places(w), w)),
    "chosen": lambda w: torch.where(w.float() > 0, w, w.roll(1, 0)),
    "padded": lambda w: F.pad(w, (1, 2)),
    "written": lambda w: (
        torch.slice_scatter(w, w[:1], 0, 1, 2),
        torch.select_scatter(w, w[0], 0, 1),
    ),
    "weight": lambda w: torch.ones(3, 8, device=w.device) @ w.to(torch.float32).t(),
}


def wide(result: Any) -> list[Tensor]:
    """The results as numbers: one NaN of float8 is another one behind XLA."""
    given = result if isinstance(result, (tuple, list)) else [result]
    return [x.float() if x.dtype in FLOAT8 else x for x in given]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str, dtype: torch.dtype, recorder: Recorder) -> None:
    move = MOVES[name]
    compiled = torch.compile(move, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for rows in (2, 5, 7):
            w = torch.randint(256, (rows, 8), dtype=torch.uint8).view(dtype)
            for mine, eager in zip(wide(compiled(w)), wide(move(w)), strict=True):
                torch.testing.assert_close(mine, eager, equal_nan=True)


def numbers(dtype: torch.dtype) -> Tensor:
    """Every float8, what is between them, and what is beyond them."""
    every = torch.arange(256, dtype=torch.uint8)
    known = torch.cat([every.view(each).double() for each in FLOAT8])
    known = torch.cat([known, known * 1.0625, known * 1.03, torch.tensor([449.0, 1e9, 464.0, 6e4, 6.2e4])])
    if dtype.is_floating_point or dtype.is_complex:
        return torch.cat([known, -known, torch.tensor([torch.inf, -torch.inf])]).to(dtype)
    return known.nan_to_num(0, 0, 0).to(dtype)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversions_to_float8(dtype: torch.dtype, recorder: Recorder) -> None:
    for other in (*WIDE, *OTHERS, *FLOAT8):
        x = numbers(torch.float64).to(other) if other in FLOAT8 else numbers(other)
        torch._dynamo.reset()
        with recorder.expect(eager_ops=0):
            made = torch.compile(lambda x: x.to(dtype), backend="dynaxla")(x)
        assert made.dtype is dtype
        torch.testing.assert_close(made.float(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversions_of_float8(dtype: torch.dtype, recorder: Recorder) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    for other in (*WIDE, *OTHERS):
        given = x if other.is_floating_point or other.is_complex else x[x.float().abs() < 100]
        torch._dynamo.reset()
        with recorder.expect(eager_ops=0):
            made = torch.compile(lambda x, other=other: x.to(other), backend="dynaxla")(given)
        torch.testing.assert_close(made, given.to(other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_fused_conversion_is_that_of_memory(dtype: torch.dtype) -> None:
    def scaled(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        stored = (x * scale).to(dtype)
        return stored, stored.to(torch.float32) / scale

    x, scale = torch.randn(64, 8) * 300, torch.tensor(1.7)
    compiled = torch.compile(scaled, backend="dynaxla", dynamic=True)
    for rows in (3, 17, 64):
        stored, read = compiled(x[:rows], scale)
        assert_close(stored, scaled(x[:rows], scale)[0])
        assert_close(read, stored.float() / scale)


def test_numbers_that_float8_does_not_hold_raise_as_in_eager() -> None:
    def fill(x: Tensor, number: float) -> Tensor:
        return torch.full_like(x, number, dtype=torch.float8_e4m3fn)

    for number in (1000.0, torch.inf):
        torch._dynamo.reset()
        for function in (fill, torch.compile(fill, backend="dynaxla")):
            with pytest.raises(RuntimeError, match="cannot be converted to type"):
                function(torch.ones(2), number)


def test_arithmetic_of_float8_runs_in_eager(recorder: Recorder) -> None:
    x = torch.randn(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def product(x: Tensor) -> Tensor:
        return torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32) * 2

    compiled = torch.compile(product, backend="dynaxla")
    assert_close(compiled(x), product(x))
    assert "unsupported" in recorder.snapshot().fallbacks[-1] or "no_lowering" in recorder.snapshot().fallbacks[-1]
