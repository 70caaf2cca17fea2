"""Graphs of quantizers are compiled whole, and round as torch's own kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # it defines the ops
from torch import Tensor

import dynaxla
from tests.tolerances import assert_close

ops = torch.ops.quantized_decomposed
INT8, UINT8 = torch.int8, torch.uint8
SCALE, ZERO, LOW, HIGH = torch.tensor([0.037]), torch.tensor([3]), torch.tensor(-100), torch.tensor(90)


def _there_and_back(x: Tensor, scale: Any, zero: Any, low: Any, high: Any, dtype: torch.dtype, kind: str) -> Any:
    whole = getattr(ops.quantize_per_tensor, kind)(x, scale, zero, low, high, dtype)
    return whole, getattr(ops.dequantize_per_tensor, kind)(whole, scale, zero, low, high, dtype)


def _dynamic(x: Tensor) -> Any:
    scale, zero = ops.choose_qparams.tensor(x, -128, 127, 1e-5, INT8)
    return scale, zero, *_there_and_back(x, scale, zero, -128, 127, INT8, "tensor")


def _tokens(x: Tensor) -> Any:
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x, INT8)
    whole = ops.quantize_per_token(x, scales, zeros, -128, 127, INT8)
    return scales, zeros, whole, ops.dequantize_per_token(whole, scales, zeros, -128, 127, INT8, torch.float32)


def _channels(x: Tensor, axis: int) -> Any:
    scales, zeros = x.abs().amax(1 - axis) / 64, torch.arange(x.shape[axis])
    whole = ops.quantize_per_channel(x, scales, zeros, axis, -128, 127, INT8)
    return (
        whole,
        ops.dequantize_per_channel(whole, scales, zeros, axis, -128, 127, INT8),
        ops.dequantize_per_channel(whole, scales, None, axis, -128, 127, INT8, out_dtype=torch.bfloat16),
    )


def _groups(x: Tensor) -> Any:
    whole, scales = (x * 3).to(INT8), x[:, :2].abs().contiguous()
    return ops.dequantize_per_channel_group(whole, scales, None, -8, 7, INT8, 4, torch.float32)


def _layer(x: Tensor) -> Any:
    """A linear layer as a quantizer writes it."""
    weight = ops.dequantize_per_channel(torch.arange(24).view(3, 8).to(INT8), torch.ones(3), None, 0, -127, 127, INT8)
    inner = _there_and_back(x, 0.02, 128, 0, 255, UINT8, "default")[1]
    return _there_and_back(torch.nn.functional.linear(inner, weight).relu(), 0.5, 0, 0, 255, UINT8, "default")


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "int8": lambda x: _there_and_back(x, 0.037, 3, -128, 127, INT8, "default"),
    "uint8": lambda x: _there_and_back(x, 0.0113, 130, 0, 255, UINT8, "default"),
    "half": lambda x: _there_and_back(x.bfloat16(), 0.037, 3, -128, 127, INT8, "default"),
    "tensor": lambda x: _there_and_back(x, SCALE, ZERO, -128, 127, INT8, "tensor"),
    "tensor2": lambda x: _there_and_back(x, SCALE, ZERO, LOW, HIGH, INT8, "tensor2"),
    "dynamic": _dynamic,
    "symmetric": lambda x: (
        *ops.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, INT8),
        *ops.choose_qparams_symmetric.tensor(x, 0, 255, 1e-5, UINT8),
    ),
    "tokens": _tokens,
    "rows": lambda x: _channels(x, 0),
    "columns": lambda x: _channels(x, 1),
    "groups": _groups,
    "layer": _layer,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_eager(name: str, dynamic: bool) -> None:
    function = CALLS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    before = dynaxla.read_metrics()
    for rows in (12, 9, 11) if dynamic else (6,):
        torch.manual_seed(rows)
        x = torch.randn(rows, 8) * 2
        x[0, 0] = 0.037 * 2.5  # halfway between two whole numbers
        for mine, eager in zip(_listed(compiled(x)), _listed(function(x)), strict=True):
            assert mine.dtype is eager.dtype
            assert_close(mine, eager)
    after = dynaxla.read_metrics()
    assert after.eager_ops == before.eager_ops, after.fallbacks[len(before.fallbacks) :]
    assert after.compiles - before.compiles == 1


def test_zeros_alone_have_the_least_scale() -> None:
    x = torch.zeros(3, 4)
    for mine, eager in zip(torch.compile(_dynamic, backend="dynaxla")(x), _dynamic(x), strict=True):
        assert_close(mine, eager)


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
