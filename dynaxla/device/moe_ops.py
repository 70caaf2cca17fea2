"""What mixtures of experts call on accelerators: how many tokens each expert has, and products in groups.

On the host models call other ops for both, as eager's kernels there, or torch's capture, do not take what accelerators do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaxla.custom_ops import internal

aten = torch.ops.aten
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of integers too, which eager on the host refuses."""
    if x.dtype not in _INTEGERS:
        return aten.histc.default(x, bins, min, max)  # type: ignore[no-any-return]
    flat = x.reshape(-1).to(torch.int64)
    low, high = flat.new_full((), int(min)), flat.new_full((), int(max))
    if int(min) == int(max) and flat.numel():
        low, high = flat.min(), flat.max()
    low, high = low - (low == high).long(), high + (low == high).long()
    inside = (flat >= low) & (flat <= high)
    place = torch.where(inside, (flat - low) * bins // (high - low), 0).clamp(max=bins - 1)
    return flat.new_zeros(bins).index_add(0, place, inside.long()).to(x.dtype)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows in groups times a matrix for each, or the products over each group's rows; torch captures these in bfloat16 alone.

    Others, and wrong ones, are left to the op.
    """
    plain = bias is None and left.dtype is right.dtype and left.dtype in _PRODUCTS and out_dtype in (None, left.dtype)
    if plain and offs is not None and offs.dtype is torch.int32 and offs.dim() == 1 and left.dim() == 2:
        if right.dim() == 3 and left.shape[1] == right.shape[1] and offs.shape[0] == right.shape[0]:
            return internal.GROUPED_PRODUCT(left, right, offs)  # type: ignore[no-any-return]
        if right.dim() == 2 and left.shape[1] == right.shape[0]:
            return internal.GROUP_PRODUCTS(left.t(), right, offs)  # type: ignore[no-any-return]
    return aten._grouped_mm.default(left, right, offs, bias, out_dtype)  # type: ignore[no-any-return]


EXPERTS: Mapping[Any, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten._grouped_mm.default: _grouped_product,
}
