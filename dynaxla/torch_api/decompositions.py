"""torch's decompositions of ATen ops, and what torch writes them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.inductor_prims  # defines prims.fma
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import get_computation_dtype, suggest_memory_format

from dynaxla.torch_api.overloads import OpOverload

__all__ = ["get_computation_dtype", "suggest_memory_format"]
# get_computation_dtype(dtype): what eager computes in, float32 for 16-bit floats.
# suggest_memory_format(tensor): that of the results of ops that keep their operand's.

Decomposition = Callable[..., Any]

MULTIPLY_ADD: OpOverload = torch.ops.prims.fma.default
"""What Dynamo writes for an eager `addcmul_`. Relies on torch._inductor.inductor_prims, which defines it."""


def core_decompositions() -> Mapping[OpOverload, Decomposition]:
    """Those that lead to torch's core ATen ops. Relies on `torch._decomp.core_aten_decompositions`."""
    return core_aten_decompositions()  # type: ignore[return-value]


def decompositions_of(ops: Sequence[Any]) -> Mapping[OpOverload, Decomposition]:
    """Those of these overloads, and of all overloads of these packets. Relies on `torch._decomp.get_decompositions`."""
    return get_decompositions(ops)  # type: ignore[return-value]


def resized_to(sizes: Sequence[Any], output_size: Any, scale_factors: Any) -> Any:
    """The image sizes that an upsampling op's `vec` overload computes.

    Relies on `torch._decomp.decompositions.upsample_compute_output_size`.

    Args:
        sizes: of the whole input, [n, channels, ...].
        output_size, scale_factors: of which one is None.
    """
    return upsample_compute_output_size(sizes, output_size, scale_factors)
