"""Attention whose mask is told by rows, as `lowering/mask_segments.py` finds it: by kernels on a TPU, else by a mask."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from dynaxla.custom_ops import internal
from dynaxla.ops import splash_attention
from dynaxla.ops.attention import attention, attention_backward, has_kernel, scale_factor, separate
from dynaxla.ops.record import OpFamily

OPS = OpFamily()


def attention_of_segments_on_tpu(
    query: Array,
    key: Array,
    value: Array,
    kept: Sequence[Array],
    ids: Sequence[Array],
    is_causal: bool,
    scale: float | None,
    saves: bool = True,
) -> tuple[Array, Array]:
    """As `attention_of_segments`, by a kernel where one takes the call."""
    if not has_kernel(query, key):
        return attention_of_segments(query, key, value, kept, ids, is_causal, scale)
    factor = scale_factor(query, scale)
    if saves or ids:
        segments = splash_attention.find_segments(query, key, kept, ids)
        return splash_attention.attend(query, key, value, segments, is_causal, factor)
    output = splash_attention.attend_only(query, key, value, kept, is_causal, factor)
    return output, jnp.full(query.shape[:-1], jnp.nan, jnp.float32)


@OPS.op(internal.ATTENTION_OF_SEGMENTS, on_tpu=attention_of_segments_on_tpu)
def attention_of_segments(
    query: Array,
    key: Array,
    value: Array,
    kept: Sequence[Array],
    ids: Sequence[Array],
    is_causal: bool,
    scale: float | None,
    saves: bool = True,
) -> tuple[Array, Array]:
    del saves  # XLA drops what is not read
    return attention(query, key, value, _mask_of_segments(kept, ids), is_causal, scale)


def attention_of_segments_backward_on_tpu(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    kept: Sequence[Array],
    ids: Sequence[Array],
    out: Array,
    logsumexp: Array,
    is_causal: bool,
    scale: float | None,
) -> tuple[Array, Array, Array]:
    """As `attention_of_segments_backward`, by a kernel where one takes the call."""
    if not has_kernel(query, key):
        query = separate(query)
        return attention_of_segments_backward(grad, query, key, value, kept, ids, out, logsumexp, is_causal, scale)
    segments, factor = splash_attention.find_segments(query, key, kept, ids), scale_factor(query, scale)
    return splash_attention.attend_backward(grad, query, key, value, segments, out, logsumexp, is_causal, factor)


@OPS.op(internal.ATTENTION_OF_SEGMENTS_BACKWARD, on_tpu=attention_of_segments_backward_on_tpu)
def attention_of_segments_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    kept: Sequence[Array],
    ids: Sequence[Array],
    out: Array,
    logsumexp: Array,
    is_causal: bool,
    scale: float | None,
) -> tuple[Array, Array, Array]:
    mask = _mask_of_segments(kept, ids)
    return attention_backward(grad, query, key, value, mask, out, logsumexp, is_causal, scale)


def _mask_of_segments(kept: Sequence[Array], ids: Sequence[Array]) -> Array | None:
    factors = [*kept, ids[0] == ids[1]] if ids else kept
    return functools.reduce(jnp.logical_and, factors) if factors else None
