"""Ops of the op table whose results have other dtypes in eager than torch's fake kernels predict.

Such calls become ops whose prediction is right; other calls of the same ops stay as they are. Ops of which eager's result has a
dtype that no other op gives are refused by a check of their records instead (`ops/eager_errors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dynaxla.ops.dtypes import HALVES
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten
_ROUNDS_RUNNING = aten._native_batch_norm_legit_functional.default


def _normalize_in_float32(op: OpOverload, x: Tensor, *arguments: Any) -> Any:
    """Computes a normalization of a 16-bit x in float32, as eager does.

    Eager's CPU kernels give statistics the dtype of the parameters, where torch's fake kernels say x's dtype, and float32 for
    the new running statistics of a batch norm. All results are rounded in the graph.

    Args:
        op: the normalization.
        x: its input.
        arguments: its other arguments; their tensors are the parameters.

    Returns:
        The op's results; NotImplemented where torch predicts their dtypes, and where eager refuses those of the parameters.
    """
    dtypes = {given.dtype for given in arguments if isinstance(given, Tensor)}
    rounds = op is _ROUNDS_RUNNING and dtypes == {x.dtype} and not x.is_cuda
    kept = x.dtype if rounds else torch.float32
    if x.dtype not in HALVES or dtypes != {kept}:
        return NotImplemented
    wide = [given.float() if isinstance(given, Tensor) else given for given in arguments]
    y, *statistics = op(x.float(), *wide)
    return y.to(x.dtype), *(value.to(kept) for value in statistics)


def _ldexp(x: Tensor, other: Tensor) -> Any:
    """Computes x * 2 ** other: of whole numbers and a 16-bit number without dims it has 16 bits, where torch says float32."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    if not whole or other.dtype not in HALVES or other.dim():
        return NotImplemented
    return x * torch.pow(2.0, other)


EAGER_DTYPES: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        **{
            op: partial(_normalize_in_float32, op)
            for op in (
                aten.native_layer_norm.default,
                aten.native_group_norm.default,
                aten._native_batch_norm_legit.no_stats,
                aten._native_batch_norm_legit_no_training.default,
                aten._native_batch_norm_legit_functional.default,
            )
        },
        aten.ldexp.Tensor: _ldexp,
    }
)
"""By op, a decomposition that returns NotImplemented for calls whose dtypes torch predicts."""


def call_as_eager(op: OpOverload, *arguments: Any) -> Any:
    """Calls one of these ops. Its results have the dtypes of eager's, fake ones too."""
    results = EAGER_DTYPES[op](*arguments)
    return op(*arguments) if results is NotImplemented else results
