"""Rows of the ops of neural networks: attention, convolution, embedding, normalization, pooling."""

from __future__ import annotations

import torch

from dynaxla.ops.spec import OpSpec, Support
from dynaxla.ops.tables.data import FLOATS, REAL_NUMBERS, argument, tensor_of

aten = torch.ops.aten

_OUT_OF_RANGE = "a row number out of range, for which torch raises, gives NaN"


def check_attention(node: torch.fx.Node) -> str | None:
    """Refuse dropout, whose random numbers are eager PyTorch's, integers, and keys and values of different lengths."""
    if tensor_of(node, "query").dtype not in FLOATS:
        return "attention of integers"
    keys, values = (_example(tensor_of(node, name).shape[-2]) for name in ("key", "value"))
    if keys != values:
        return f"attention over {keys} keys and {values} values: PyTorch reads as many values as there are keys"
    return "attention with dropout draws random numbers" if argument(node, "dropout_p") else None


def _example(size: int | torch.SymInt) -> int | None:
    """A size, as it is in the call that is compiled for."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def check_dense(node: torch.fx.Node) -> str | None:
    """Refuse sparse gradients."""
    return "a sparse gradient" if argument(node, "sparse") else None


def _rows(
    *targets: torch._ops.OpOverload, limits: str = "", dtypes: frozenset[torch.dtype] | None = None
) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(target, Support.JAX, dtypes=dtypes, limits=limits) for target in targets)


ATTENTION = tuple(
    OpSpec(target, Support.JAX, check=check_attention, limits="without dropout")
    for target in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
)

CONVOLUTION = _rows(aten.convolution.default, aten.convolution_backward.default, dtypes=REAL_NUMBERS)

EMBEDDING = (
    *_rows(
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.embedding_renorm.default,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._embedding_bag_dense_backward.default,
        aten._embedding_bag_per_sample_weights_backward.default,
        limits=_OUT_OF_RANGE,
    ),
    OpSpec(aten._embedding_bag_backward.default, Support.JAX, check=check_dense, limits="no sparse gradient"),
)

NORMALIZATION = _rows(
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._fused_rms_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    dtypes=FLOATS | {torch.complex64, torch.complex128},
)

POOLING = (
    *_rows(
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices.default,
        aten.max_pool3d_with_indices_backward.default,
        dtypes=REAL_NUMBERS,
    ),
    *_rows(
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        dtypes=FLOATS | {torch.int64},
    ),
    *_rows(
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
        dtypes=frozenset({torch.float32, torch.float64, torch.int64}),
    ),
    *_rows(
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool3d_backward.default,
        dtypes=FLOATS,
    ),
    *_rows(
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.adaptive_max_pool3d.default,
        aten.adaptive_max_pool3d_backward.default,
        dtypes=FLOATS | {torch.int64},  # int64: where the largest element was
    ),
    *_rows(
        aten.fractional_max_pool2d.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d.default,
        aten.fractional_max_pool3d_backward.default,
        dtypes=frozenset({torch.float32, torch.float64, torch.int64}),  # eager rounds the places of 16-bit samples
    ),
)

ROWS: tuple[OpSpec, ...] = (*ATTENTION, *CONVOLUTION, *EMBEDDING, *NORMALIZATION, *POOLING)
