"""Statistics of batch norms of 16-bit floats in training.

torch's fake kernel predicts float32 for the new running statistics and the image's dtype for the batch statistics; its
real kernel gives all of them the dtype of the old running statistics. Here they are computed in float32 and rounded in
the graph, so that the predicted dtypes are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.overloads import OpOverload

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def batch_norm_in_float32(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Computes the op in float32. Its results have the dtypes of the real kernel's."""
    if not training or x.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    wide = [None if given is None else given.float() for given in (x, weight, bias, running_mean, running_var)]
    y, *statistics = _BATCH_NORM(*wide, training, momentum, eps)  # type: ignore[arg-type]
    return y.to(x.dtype), *(value.to(running_mean.dtype) for value in statistics)


BATCH_NORM_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {_BATCH_NORM: batch_norm_in_float32}
)
