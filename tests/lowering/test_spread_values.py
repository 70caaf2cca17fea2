"""A small table that an op spreads over a batch is computed once on the CPU, not for each element of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from dynaxla.options import DEBUG_VARIABLE
from tests.lowering.test_locations import read_dump
from tests.tolerances import assert_close

Function = Callable[..., Tensor]


def encode_positions(x: Tensor, positions: Tensor) -> Tensor:
    rates = torch.exp(torch.arange(0, 16, 2) * -0.5)
    angles = positions[:, None] * rates
    return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angles = torch.outer(positions.float(), 10000 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
    half = torch.cat([-x[..., 8:], x[..., :8]], -1)
    return x * angles.cos() + half * angles.sin()


def gather(x: Tensor, positions: Tensor) -> Tensor:
    table = torch.sin(torch.arange(64.0))[:, None] * torch.ones(16)
    return x + table[positions.expand(x.shape[:-1])]


def sums(x: Tensor, positions: Tensor) -> Tensor:
    return (x * torch.erf(positions.float() / 9)[:, None]).sum((0, 1))


def alone(x: Tensor, positions: Tensor) -> Tensor:
    return x.sin() + positions[:, None]


def product(x: Tensor, positions: Tensor) -> Tensor:
    return x @ torch.sin(positions.float()[:16, None] * torch.arange(16))


def few(x: Tensor, positions: Tensor) -> Tensor:
    return x[:2, :1] + positions.float().exp()[:, None]


CASES = {
    **dict.fromkeys((encode_positions, gather, sums), 1),
    rotate: 2,
    **dict.fromkeys((alone, product, few), 0),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_table_is_computed_once(
    function: Function, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path},stages=stablehlo+hlo")
    arguments = torch.randn(64, 12, 64, 16), torch.arange(64)
    with recorder.expect(compiles=1, eager_ops=0):
        result = torch.compile(function, backend="dynaxla", dynamic=False)(*arguments)
    assert_close(result, function(*arguments))
    (module,), (hlo,) = (read_dump(tmp_path, stage) for stage in ("stablehlo", "hlo"))
    assert module.partition("return")[0].count("inlineable") == CASES[function]
    assert hlo.count(" call(") >= CASES[function]


def test_sizes_that_vary_and_gradients(recorder: Recorder) -> None:
    compiled = torch.compile(rotate, backend="dynaxla", dynamic=True)
    for batch, length in ((40, 30), (64, 64), (33, 17), (1, 64)):
        x, positions = torch.randn(batch, 12, length, 16), torch.randint(0, 99, (length,))
        given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        with recorder.expect(eager_ops=0):
            result = compiled(given, positions)
        assert_close(result, rotate(expected, positions))
        weights = torch.randn_like(result)
        result.backward(weights)
        rotate(expected, positions).backward(weights)
        assert_close(given.grad, expected.grad)
