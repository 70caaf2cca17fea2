"""Attention on a TPU by JAX's own kernels (Pallas, "splash attention"), which keep no array of queries by keys in memory.

A block of queries meets one block of keys after the other, with a running maximum and sum (Dao et al. 2022, FlashAttention);
blocks that a causal mask hides are skipped, and heads that share a key read it where it is. XLA cannot partition the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from dynaxla.runtime.xla import splash_attention_gradient

if TYPE_CHECKING:
    from jax import Array

_LEAST_SCORES_BYTES = 1 << 24
"""Smaller scores, in float32, may well stay in the chip's own memory."""
_BLOCKS = (512, 256, 128)
"""Queries and keys of a block. A power of two up to 512; lengths are multiples of a vector's 128 lanes."""
_NOTHING = -1e37
"""The logsumexp of a query that attends to nothing is below: the kernels give hidden scores -2.4e38."""
_NO_SEGMENT = -(1 << 31)
"""The segment of keys that no query attends to."""


def takes(query: Sequence[int], key: Sequence[int], dtype: str) -> bool:
    """Whether the kernels compute a call without a mask of its own: its scores are large, and its dtype is that of the matrix
    unit, for which they round as XLA does.

    Args:
        query, key: their shapes, [b, h, q, e] and [b, g, k, e].
        dtype: its name.
    """
    lengths = query[2], key[2]
    is_large = 4 * math.prod(query[:2]) * math.prod(lengths) > _LEAST_SCORES_BYTES
    fits = all(length % _BLOCKS[-1] == 0 for length in lengths) and query[0] == key[0]
    return is_large and fits and dtype == "bfloat16"


def attend(
    query: Array, key: Array, value: Array, segments: tuple[Array, Array] | None, is_causal: bool, factor: float
) -> tuple[Array, Array]:
    """The output [b, h, q, v] of attention, and the logsumexp of the scores [b, h, q] in float32.

    Args:
        query, key, value: [b, h, q, e], [b, g, k, e] and [b, g, k, v], where g divides h; bfloat16.
        segments: int32 of queries [b, q] and of keys [b, k], which must be equal; None: all are.
        factor: of the scores. The query times it is rounded, as the kernel takes a query alone.
    """
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(False):  # the TPU's compiler rejects 64-bit numbers in the kernels' index maps
        kernel = _kernel(query.shape, key.shape, is_causal, saves=True)
        output, (logsumexp,) = jax.vmap(kernel)(_times(query, factor), key, value, _segment_ids(segments))
        if segments is None:
            return output, logsumexp
        is_nothing = logsumexp < _NOTHING
        return jnp.where(is_nothing[..., None], 0, output), jnp.where(is_nothing, -jnp.inf, logsumexp)


def attend_only(query: Array, key: Array, value: Array, kept: Sequence[Array], is_causal: bool, factor: float) -> Array:
    """The output of `attend` alone: the kernel writes no logsumexp, each of which takes 128 lanes.

    Args:
        kept: bools of keys, as `find_segments` takes them.
    """
    import jax
    import jax.numpy as jnp

    segments = find_segments(query, key, kept, ())
    with jax.enable_x64(False):
        kernel = _kernel(query.shape, key.shape, is_causal, saves=False)
        output = jax.vmap(kernel)(_times(query, factor), key, value, _segment_ids(segments))
        if segments is None:
            return output  # type: ignore[no-any-return]
        sees_any = _see_any(segments[1] != _NO_SEGMENT, query.shape[2], is_causal)
        return jnp.where(sees_any[:, None, :, None], output, 0)


def _see_any(kept: Array, queries: int, is_causal: bool) -> Array:
    """Whether a query attends to a key, [b, q], from the keys that are kept, [b, k]."""
    import jax.numpy as jnp
    from jax import lax

    if not is_causal:
        return jnp.broadcast_to(kept.any(1, keepdims=True), (kept.shape[0], queries))
    so_far = lax.cummax(kept.astype(jnp.int32), 1) > 0
    return jnp.pad(so_far, ((0, 0), (0, max(queries - kept.shape[1], 0))), mode="edge")[:, :queries]


def attend_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    segments: tuple[Array, Array] | None,
    out: Array,
    logsumexp: Array,
    is_causal: bool,
    factor: float,
) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value, from what `attend` gave. Shapes and dtypes are those of `attend`."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(False):
        made = _kernel(query.shape, key.shape, is_causal, saves=False)
        if segments is not None:
            is_nothing = jnp.isneginf(logsumexp)
            grad, logsumexp = jnp.where(is_nothing[..., None], 0, grad), jnp.where(is_nothing, 0, logsumexp)
        ids = _segment_ids(segments)
        rule = splash_attention_gradient()

        def of_row(grad: Array, query: Array, key: Array, value: Array, ids: Any, out: Array, logsumexp: Array) -> Any:
            saved = (query, key, value, ids, None, out, logsumexp, made.dq_mask_info, made.dkv_mask_info)
            return rule(*(made.kwargs[name] for name in _OF_RULE), saved, grad)[3:6]

        grad_query, *others = jax.vmap(of_row)(grad, _times(query, factor), key, value, ids, out, logsumexp)
        return _times(grad_query, factor), *others


_OF_RULE = (
    "save_residuals",
    "mask_value",
    "is_mqa",
    "block_sizes",
    "residual_checkpoint_name",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
)


def find_segments(query: Array, key: Array, kept: Sequence[Array], ids: Sequence[Array]) -> tuple[Array, Array] | None:
    """The segments of queries and keys, from the arguments of `attention_of_segments`; None: all are one."""
    import jax.numpy as jnp

    (batch, _, rows, _), columns = query.shape, key.shape[2]
    if not kept and not ids:
        return None
    of_queries, of_keys = jnp.zeros((batch, rows), jnp.int32), jnp.zeros((batch, columns), jnp.int32)
    if ids:
        of_queries = jnp.broadcast_to(ids[0], (batch, 1, rows, 1)).reshape(batch, rows).astype(jnp.int32)
        of_keys = jnp.broadcast_to(ids[1], (batch, 1, 1, columns)).reshape(batch, columns).astype(jnp.int32)
    for each in kept:
        each = jnp.broadcast_to(each, (batch, 1, 1, columns)).reshape(batch, columns)
        of_keys = jnp.where(each, of_keys, jnp.int32(_NO_SEGMENT))
    return of_queries, of_keys


def _segment_ids(segments: tuple[Array, Array] | None) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    return None if segments is None else splash.SegmentIds(*segments)


def _kernel(queries: Sequence[int], keys: Sequence[int], is_causal: bool, *, saves: bool) -> Any:
    """The kernel of one row of a batch.

    Args:
        queries, keys: the shapes of the batch's, [b, h, q, e] and [b, g, k, e].
        saves: whether it gives the logsumexp, too; else it has what its gradient needs.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    lengths = queries[2], keys[2]
    mask = (masks.CausalMask if is_causal else masks.FullMask)(lengths)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * queries[1]),
        block_sizes=_block_sizes(*lengths, saves),
        save_residuals=saves,
        head_shards=1,
        q_seq_shards=1,
    )


@cache
def _block_sizes(queries: int, keys: int, saves: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    rows, columns = (next(size for size in _BLOCKS if length % size == 0) for length in (queries, keys))
    return splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=None if saves else rows,
        block_kv_dkv=None if saves else columns,
        block_q_dq=None if saves else rows,
        block_kv_dq=None if saves else columns,
    )


def _times(x: Array, factor: float) -> Array:
    return (x.astype("float32") * factor).astype(x.dtype)
