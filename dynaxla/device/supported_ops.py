"""Which ATen ops the device computes, which of sparse tensors the host does, and which are refused: of quantized and strided
nested tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import OnlyStrided
from dynaxla.ops.table import OpTable
from dynaxla.torch_api.overloads import OpOverload, aten_ops, gives_view, is_composite
from dynaxla.torch_api.private_device import Kernels, get_composite_kernel
from dynaxla.types import DEVICE_TYPE

aten = torch.ops.aten

NESTED = (
    aten._nested_tensor_from_tensor_list.default,
    aten._nested_tensor_from_mask.default,
    aten._nested_from_padded.default,
    aten._nested_view_from_buffer.default,
    aten._nested_view_from_buffer_copy.default,
    aten._nested_view_from_buffer_copy.out,
)
"""Ops that make strided nested tensors of dense ones; where autograd follows them, torch ends the process."""

OF_PARTS = {
    "Sparse": (
        aten._coalesced_.default,
        aten._dimI.default,
        aten._dimV.default,
        aten._indices.default,
        aten._nnz.default,
        aten._sparse_coo_tensor_with_dims.default,
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        aten._values.default,
        aten.clone.default,
        aten.copy_.default,
        aten.copy_sparse_to_sparse_.default,
        aten.dense_dim.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.indices.default,
        aten.is_coalesced.default,
        aten.sparse_dim.default,
        aten.sparse_resize_.default,
        aten.sparse_resize_and_clear_.default,
        aten.values.default,
    ),
    "SparseCsr": (
        aten._nnz.default,
        aten.ccol_indices.default,
        aten.clone.default,
        aten.col_indices.default,
        aten.copy_.default,
        aten.crow_indices.default,
        aten.dense_dim.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.resize_as_sparse_.default,
        aten.row_indices.default,
        aten.sparse_dim.default,
        aten.values.default,
    ),
}
"""Ops that make a sparse tensor of its parts (indices and values, dense tensors of the device), name them, or copy each."""


OF_OTHERS = (
    # Its kernel in C++ calls `_copy_from`; a kernel in Python would get a plain number where the schema has a tensor, and could
    # not pass it on.
    aten.copy_.default,
    # Tangents lie in as much memory as their primals, with gaps where these have gaps: autograd makes views of both.
    aten._new_zeros_with_same_feature_meta.default,
    # They read what lies in a tensor's memory, not its elements alone.
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)
"""Ops that torch's own kernels compute, of others."""


def find_supported_ops(table: OpTable) -> list[OpOverload]:
    """The ops of ATen that are in the table or decomposed to such, and those that write what these give.

    Not among them: views, also those that a tensor becomes in place, which torch makes of `as_strided`, what torch takes apart
    before autograd, and `OF_OTHERS`.
    """
    known: Collection[object] = {*table.records, *decomposition_table(), *random_decompositions()}
    return [op for op in aten_ops().values() if not _is_torchs(op) and _is_known(op, known)]


def _is_torchs(op: OpOverload) -> bool:
    return op in OF_OTHERS or is_composite(op) or gives_view(op) or torch.Tag.inplace_view in op.tags


def _is_known(op: OpOverload, known: Collection[object]) -> bool:
    function = FunctionalForm.of(op).function
    return function is not None and (function in known or not isinstance(function, OpOverload))


def register_layouts(kernels: Kernels, on_host: Callable[..., Any]) -> None:
    """Registers the ops of sparse tensors, and what raises `OnlyStrided` for the other layouts.

    Args:
        on_host: computes an op of sparse tensors on the host; takes the op in front of its arguments.
    """
    for op in NESTED:
        kernels.add(op, partial(_refused, op))
    kernels.add_for_host(NESTED[0], _nested_of_host(NESTED[0]))
    kernels.add_rest_of_other_layouts(_refused)
    kernels.add_sparse(on_host, OF_PARTS)


def _refused(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    raise OnlyStrided(op)


def _nested_of_host(op: OpOverload) -> Callable[..., Any]:
    """The host's kernel of an op that makes nested tensors, which may be asked for one of the device."""
    own = get_composite_kernel(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        places = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
        if any(place.type == DEVICE_TYPE for place in places):
            raise OnlyStrided(op)
        return own(*args, **kwargs)

    return run
