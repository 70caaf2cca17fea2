"""torch's decompositions of ATen ops, and helper functions that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch._inductor.inductor_prims  # defines prims.fma
import torch._prims
from torch import Tensor
from torch._decomp import core_aten_decompositions, decomposition_table, get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import get_computation_dtype, suggest_memory_format
from torch.fx import Graph

from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only
from dynaxla.torch_api.tracing import trace_calls

__all__ = ["get_computation_dtype", "suggest_memory_format"]
# get_computation_dtype(dtype): the dtype in which eager computes, float32 for 16-bit floats.
# suggest_memory_format(tensor): the memory format of results of ops that preserve their operand's.

Decomposition = Callable[..., Any]

_KEPT_PRIMS = frozenset({torch.ops.prims.convert_element_type.default, torch.ops.prims.squeeze.default})
_NESTED_DECOMPOSITIONS: tuple[OpOverload, ...] = (
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._unsafe_index.Tensor,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten._unsafe_masked_index.default,
    torch.ops.aten._unsafe_masked_index_put_accumulate.default,
    torch.ops.aten.any.dims,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.index_fill.int_Scalar,
    torch.ops.aten.log_sigmoid_forward.default,
    torch.ops.aten.logsumexp.default,
    torch.ops.aten.squeeze.dims,
)

MULTIPLY_ADD: OpOverload = torch.ops.prims.fma.default
"""Op that Dynamo emits for an eager `addcmul_`. Relies on torch._inductor.inductor_prims, which defines it."""


def core_decompositions() -> Mapping[OpOverload, Decomposition]:
    """Returns torch's decompositions into core ATen ops. Relies on `torch._decomp.core_aten_decompositions`."""
    return core_aten_decompositions()  # type: ignore[return-value]


def decompositions_of(ops: Sequence[Any]) -> Mapping[OpOverload, Decomposition]:
    """Returns torch's decompositions of these overloads, and of all overloads of these packets. Relies on
    `torch._decomp.get_decompositions`."""
    return get_decompositions(ops)  # type: ignore[return-value]


def is_native_convolution(x: Tensor, weight: Tensor, *settings: Any) -> bool:
    """Whether eager computes a convolution of these tensors of the host by kernels of torch's own, not by a library's.

    Args:
        settings: sizes of the bias, stride, padding, dilation, whether it is transposed, output padding and groups.

    Relies on `torch._C._select_conv_backend`, and on the names of these kernels in `torch._C._ConvBackend`.
    """
    names = ("bias_sizes", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    chosen = torch._C._select_conv_backend(x, weight, bias=None, **dict(zip(names, settings, strict=True)))
    return chosen.name.startswith("Slow")


def compute_output_size(sizes: Sequence[Any], output_size: Any, scale_factors: Any) -> Any:
    """Returns the image sizes that an upsampling op's `vec` overload computes.

    Relies on `torch._decomp.decompositions.upsample_compute_output_size`.

    Args:
        sizes: sizes of the input, [n, channels, ...].
        output_size, scale_factors: arguments of the op; exactly one is None.
    """
    return upsample_compute_output_size(sizes, output_size, scale_factors)


def has_decomposition(op: OpOverload) -> bool:
    """Whether torch has a decomposition of an op. Relies on `torch._decomp.decomposition_table`."""
    return op in decomposition_table


def decomposition_calls(op: OpOverload, args: Any, kwargs: Any) -> Graph:
    """Returns the graph of ATen calls in torch's decomposition of an op, traced on fake tensors. Call it within their mode.

    Relies on `torch._decomp.decomposition_table` and on `torch._C._DisableAutocast`.

    Returns:
        A graph with a placeholder for each tensor among the arguments, in their order, that returns a flat list of results.
    """

    def results(*tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        filled = tree_map_only(torch.Tensor, lambda _: next(given), (args, kwargs))
        return tree_leaves(decomposition_table[op](*filled[0], **filled[1]))

    # New tensors, as the trace identifies an operand by its object, and two nodes may share one.
    tensors = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    ]
    with torch.no_grad(), torch._C._DisableAutocast():
        return trace_calls(results, tensors, _nested_rewrites()).graph


@cache
def _nested_rewrites() -> dict[OpOverload, Decomposition]:
    """Returns rewrites for calls in torch's decompositions that torch-mlir lacks: prims as ATen, ATen ops decomposed
    again.

    Relies on `impl_aten` of the ops in `torch.ops.prims`.
    """
    prims = (getattr(torch.ops.prims, name, None) for name in torch._prims.__all__)
    as_aten = {
        prim.default: prim.default.impl_aten for prim in prims if prim is not None and prim.default not in _KEPT_PRIMS
    }
    in_turn = {op: decomposition_table[op] for op in _NESTED_DECOMPOSITIONS}
    return {**as_aten, **in_turn, torch.ops.prims.copy_strided.default: _without_strides}


def _without_strides(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copies `x`. torch's version writes to a tensor with these strides; a lowered program has no strides, writes
    nothing."""
    return torch.ops.aten.clone.default(x)  # type: ignore[no-any-return]
