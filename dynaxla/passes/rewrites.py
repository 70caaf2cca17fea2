"""The order of the passes that rewrite ops. They run on sub-graphs of higher-order operators too."""

from __future__ import annotations

from dynaxla.passes import (
    batch_norm_folding,
    canonical_ops,
    channels_last_convolution,
    channels_last_values,
    dead_code_elimination,
    filled_memory,
    grouped_query_attention,
    pooled_maxima,
    rounding_barriers,
    selected_values,
    strided_views,
    transposed_matmul,
    unmerged_linear,
)

REWRITES = (
    filled_memory.PASS,
    batch_norm_folding.PASS,
    strided_views.PASS,
    transposed_matmul.PASS,
    unmerged_linear.PASS,
    grouped_query_attention.PASS,
    pooled_maxima.PASS,
    channels_last_convolution.PASS,
    channels_last_values.PASS,
    canonical_ops.PASS,
    rounding_barriers.PASS,
    selected_values.PASS,
    dead_code_elimination.PASS,
)
