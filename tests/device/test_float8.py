"""Numbers of float8 on the device: arrays of their own, which programs take."""

from __future__ import annotations

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.ops.test_float8 import FLOAT8, MOVES, wide


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str, dtype: torch.dtype, recorder: Recorder) -> None:
    move = MOVES[name]
    compiled = torch.compile(move, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for rows in (2, 5, 7):
            w = torch.randint(256, (rows, 8), dtype=torch.uint8).view(dtype)
            there = w.to("dynaxla")
            for result in (compiled(there), move(there)):
                for mine, eager in zip(wide(result), wide(move(w)), strict=True):
                    assert mine.device.type == "dynaxla"
                    torch.testing.assert_close(mine.cpu(), eager, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_the_host_computes(dtype: torch.dtype) -> None:
    x = torch.randn(16, 16).to(dtype)
    there, one = x.to("dynaxla"), torch.ones(())
    assert (there == there).cpu().all()
    if dtype is torch.float8_e4m3fn:
        product = torch._scaled_mm(there, there.t(), one.to("dynaxla"), one.to("dynaxla"), out_dtype=torch.float32)
        torch.testing.assert_close(product.cpu(), torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32))
    there.view(torch.uint8)[0] = 0
    assert there.float()[0].cpu().eq(0).all()
    there[1:3].copy_(torch.full((2, 16), 2.0))
    assert there.float()[1:3].cpu().eq(2).all()
    assert there.cpu().float()[3:].equal(x.float()[3:])
