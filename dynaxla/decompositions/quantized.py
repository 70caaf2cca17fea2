"""Decomposes the ops of quantized graphs (`quantized_decomposed`, which torch's and torchao's quantizers emit).

Each decomposition rounds where torch's kernel does. Ops whose kernels raise for some values, such as groups with NaN,
are not decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from dynaxla.torch_api.overloads import OpOverload, is_defined

_NAMESPACE = "quantized_decomposed"
_HALVES = (torch.float16, torch.bfloat16)

Body = Callable[..., Tensor | tuple[Tensor, Tensor]]


def quantized_decompositions() -> dict[OpOverload, Body]:
    """Returns decompositions of the ops that are currently defined: importing a quantizer defines them."""
    ops = getattr(torch.ops, _NAMESPACE)
    found: dict[OpOverload, Body] = {}
    for name, body in _BODIES.items():
        packet, _, overload = name.partition(".")
        if is_defined(f"{_NAMESPACE}::{name}"):
            found[getattr(getattr(ops, packet), overload or "default")] = body
    return found


def _quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return torch.clamp(torch.round(_to_float32(x) * (1.0 / scale)) + zero_point, low, high).to(dtype)


def _quantize_by_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int | Tensor, high: int | Tensor, dtype: torch.dtype
) -> Tensor:
    inverse = (1.0 / scale.reshape(()).to(torch.float64)).to(torch.float32)
    moved = torch.round(_to_float32(x) * inverse) + zero_point.reshape(())
    bounds = [bound.reshape(()) if isinstance(bound, Tensor) else bound for bound in (low, high)]
    return torch.clamp(moved, *bounds).to(dtype)  # type: ignore[arg-type]


def _dequantize(
    x: Tensor,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return (x.to(out_dtype or torch.float32) - zero_point) * scale


def _dequantize_by_tensors(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    low: int | Tensor,
    high: int | Tensor,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return (x.to(out_dtype or torch.float32) - zero_point.reshape(())) * scale.reshape(())


def _quantize_channels(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    scales, zero_points = _along(scales, x, axis), _along(zero_points, x, axis)
    return torch.clamp(torch.round(_to_float32(x) * (1.0 / scales)) + zero_points, low, high).to(dtype)


def _dequantize_channels(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    moved = x if zero_points is None else x - _along(zero_points, x, axis)
    return (moved * _along(scales, x, axis)).to(out_dtype or torch.float32)


def _quantize_tokens(x: Tensor, scales: Tensor, zero_points: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return x.mul(1.0 / scales).add(zero_points).round().clamp(low, high).to(dtype)


def _dequantize_tokens(
    x: Tensor, scales: Tensor, zero_points: Tensor, low: int, high: int, dtype: torch.dtype, output_dtype: torch.dtype
) -> Tensor:
    return ((x - zero_points) * scales).to(output_dtype)


def _dequantize_groups(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> Tensor:
    columns = x.shape[-1]
    size = columns if group_size > columns and scales.shape[-1] == 1 else group_size
    groups = x.reshape(-1, size)
    moved = groups if zero_points is None else groups - zero_points.reshape(-1, 1)
    return (moved * scales.reshape(-1, 1)).reshape(x.shape).to(output_dtype)


def _choose(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point with which all of x, and 0, are within the bounds."""
    least, most = x.amin().clamp(max=0).reshape(1), x.amax().clamp(min=0).reshape(1)
    scale = _divide(most - least, high - low).clamp(min=_round_to_float32(eps))
    zero_point = (low - torch.round(least / scale).to(torch.int32)).clamp(low, high)
    return scale.to(torch.float64), zero_point.to(torch.int64)


def _choose_symmetric(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    most = torch.maximum(-x.amin().clamp(max=0), x.amax().clamp(min=0)).reshape(1)
    scale = _divide(most, (high - low) / 2).clamp(min=_round_to_float32(eps))
    middle = 128 if dtype is torch.uint8 else 0
    return scale.to(torch.float64), torch.full_like(scale, middle, dtype=torch.int64)


def _choose_per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point of every row. The zero point is computed from the bound with the smaller error."""
    low, high = -128, 127
    least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = _divide(most - least, high - low).clamp(min=torch.finfo(torch.float32).eps)
    below, above = least / scale, most / scale
    zero_point = torch.where((low + below) + (high + above) > 0, low - below, high - above).clamp(low, high).round()
    return scale.to(torch.float64), zero_point.to(torch.int64)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _to_float32(x: Tensor) -> Tensor:
    """Casts 16-bit floats to float32, in which they are quantized."""
    return x.to(torch.float32) if x.dtype in _HALVES else x


def _divide(x: Tensor, number: float) -> Tensor:
    """Returns the quotient, rounded once. XLA would multiply by the constant's reciprocal: the last digit of a scale
    could differ, and with it the rounding of elements."""
    return (x.to(torch.float64) / number).to(x.dtype)


def _round_to_float32(eps: float) -> float:
    """Rounds the bound to float32, as torch's kernel does."""
    return float(np.float32(eps))


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    return values.view([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])


_BODIES: Mapping[str, Body] = {
    "quantize_per_tensor": _quantize,
    "quantize_per_tensor.tensor": _quantize_by_tensors,
    "quantize_per_tensor.tensor2": _quantize_by_tensors,
    "dequantize_per_tensor": _dequantize,
    "dequantize_per_tensor.tensor": _dequantize_by_tensors,
    "dequantize_per_tensor.tensor2": _dequantize_by_tensors,
    "quantize_per_channel": _quantize_channels,
    "dequantize_per_channel": _dequantize_channels,
    "quantize_per_token": _quantize_tokens,
    "dequantize_per_token": _dequantize_tokens,
    "dequantize_per_channel_group": _dequantize_groups,
    "choose_qparams.tensor": _choose,
    "choose_qparams_symmetric.tensor": _choose_symmetric,
    "choose_qparams_per_token_asymmetric": _choose_per_token,
    "convert_element_type.no_fuse": _convert,
}
