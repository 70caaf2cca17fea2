"""Statistics of batch norms of 16-bit floats that train.

torch's fake kernel says that the new running ones are float32 and those of the batch have the dtype of the image; its real
kernel gives all of them the dtype of the old running ones. Here they are counted in float32 and rounded in the graph, so
that what is predicted is what comes out.
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
    """The op in float32, and its results in the dtypes of the real kernel's."""
    if not training or x.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    wide = [None if given is None else given.float() for given in (x, weight, bias, running_mean, running_var)]
    y, *statistics = _BATCH_NORM(*wide, training, momentum, eps)  # type: ignore[arg-type]
    return y.to(x.dtype), *(value.to(running_mean.dtype) for value in statistics)


BATCH_NORM_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {_BATCH_NORM: batch_norm_in_float32}
)
