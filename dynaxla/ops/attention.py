"""Scaled dot-product attention, forward and backward.

For 16-bit floats, scores and sums are float32, as in torch's fused kernels; the products take operands of the input
dtype, as a TPU's matrix unit does. A query that attends to no key gives zeros, as in torch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.bucketing.pad_rules import attention as attention_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops import aten_forms
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.promotion import JNP_DTYPES, cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.torch_api.symbols import example

aten = torch.ops.aten
OPS = OpFamily()

_QUERY_BLOCK = 256
"""Up to this many queries, heads that share a key are rows of one product. For more queries XLA's CPU product of that many
rows is slower than one with repeated keys, and the repetition costs little. It is also the size of query blocks."""

_MAX_SCORES_BYTES = 1 << 24
"""Scores above this size are computed in blocks: with 9 heads this takes 0.4 of the time at 1000 tokens, 0.5 at 3000."""


def check_attention(node: torch.fx.Node) -> str | None:
    """Refuses dropout (its random numbers are eager PyTorch's), integers, and keys and values of different lengths."""
    if tensor_of(node, "query").dtype not in FLOATS:
        return "attention of integers"
    keys, values = (example(tensor_of(node, name).shape[-2]) for name in ("key", "value"))
    if keys != values:
        return f"attention over {keys} keys and {values} values: PyTorch reads as many keys as there are values"
    return "attention with dropout draws random numbers" if argument(node, "dropout_p") else None


@OPS.op(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    check=check_attention,
    pad=attention_rules.attention,
    limits="without dropout",
    as_aten=aten_forms.flash_attention_for_cpu,
)
def flash_attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    del dropout_p  # the op's record refuses other values than 0
    return attention(query, key, value, attn_mask, is_causal, scale)


@OPS.op(
    internal.ATTENTION,
    pad=attention_rules.attention,
    as_aten=aten_forms.attention,
)
def attention(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """Attention of query [b, h, q, e] to key [b, g, k, e] and value [b, g, k, v], where g divides h.

    Returns:
        The output [b, h, q, v], and the logsumexp of the scores [b, h, q] in the computation dtype (minus infinity for a
        query that attends to no key), which the backward pass reads.
    """
    scores_bytes = 4 * math.prod(query.shape[:-1]) * key.shape[2]
    if query.shape[2] > _QUERY_BLOCK and scores_bytes > _MAX_SCORES_BYTES:
        return _attend_in_blocks(query, key, value, mask, is_causal, scale)
    return _attend(query, key, value, mask, is_causal, scale, 0)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    is_causal: bool,
    scale: float | None,
    first: Array | int,
) -> tuple[Array, Array]:
    """Computes `attention`; for the causal mask the first query has position `first`."""
    scores = _scores(query, key, mask, is_causal, scale, first)
    highest = jnp.max(scores, -1, keepdims=True, initial=-jnp.inf)
    shift = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, -1, keepdims=True)
    mixed = _weigh_values(weights.astype(query.dtype), value)
    output = jnp.where(total == 0, 0, mixed / jnp.where(total == 0, 1, total))
    logsumexp = (jnp.log(total) + shift)[..., 0]
    return output.astype(query.dtype), logsumexp


def _attend_in_blocks(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """Computes `attention` per block of queries, whose scores fit the processor's cache; all scores are never allocated."""
    length = query.shape[2]
    count = -(-length // _QUERY_BLOCK)
    per_query = mask is not None and mask.shape[-2] == length

    def blocks_of(x: Array) -> Array:
        """Pads and reshapes [..., queries, n] to [blocks, ..., queries per block, n]."""
        widths = [(0, 0)] * (x.ndim - 2) + [(0, count * _QUERY_BLOCK - length), (0, 0)]
        blocks = jnp.pad(x, widths).reshape(*x.shape[:-2], count, _QUERY_BLOCK, x.shape[-1])
        return jnp.moveaxis(blocks, -3, 0)

    def attend(block: tuple[Array, Array | None, Array]) -> tuple[Array, Array]:
        some, its_mask, first = block
        return _attend(some, key, value, its_mask if per_query else mask, is_causal, scale, first)

    firsts = jnp.arange(count, dtype=jnp.int32) * _QUERY_BLOCK
    masks = blocks_of(mask) if mask is not None and per_query else None
    output, logsumexp = lax.map(attend, (blocks_of(query), masks, firsts))
    rows, sums = jnp.moveaxis(output, 0, 2), jnp.moveaxis(logsumexp, 0, 2)
    return (
        rows.reshape(*rows.shape[:2], -1, rows.shape[-1])[:, :, :length],
        sums.reshape(*sums.shape[:2], -1)[:, :, :length],
    )


@OPS.op(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    check=check_attention,
    pad=attention_rules.attention_backward,
    limits="without dropout",
)
def flash_attention_for_cpu_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    del dropout_p
    return attention_backward(grad_out, query, key, value, attn_mask, out, logsumexp, is_causal, scale)


@OPS.op(internal.ATTENTION_BACKWARD, pad=attention_rules.attention_backward)
def attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    out: Array,
    logsumexp: Array,
    is_causal: bool,
    scale: float | None,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value. The mask's is not computed, as torch uses another op if it is required.

    With p = exp(scores - logsumexp): dv = p' do, ds = p (do v' - sum(do out)), dq = ds k, dk = ds' q, as in
    Dao et al. 2022 (FlashAttention), algorithm 4.
    """
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(query))]
    factor = _factor(query, scale)
    shift = jnp.where(jnp.isneginf(logsumexp), 0, logsumexp)[..., None]
    weights = jnp.exp(_scores(query, key, mask, is_causal, scale) - shift)
    correction = jnp.sum(grad.astype(wide) * out.astype(wide), -1, keepdims=True)
    slope = weights * (_grouped("bghqv,bgkv->bghqk", grad, value) - correction) * factor
    weights, slope = weights.astype(query.dtype), slope.astype(query.dtype)
    grad_query = _grouped("bghqk,bgke->bghqe", slope, key)
    grad_key = _over_groups("bghqk,bghqe->bgke", slope, query, key.shape[1])
    grad_value = _over_groups("bghqk,bghqv->bgkv", weights, grad, key.shape[1])
    return grad_query.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)


def _factor(query: Array, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(
    query: Array, key: Array, mask: Array | None, is_causal: bool, scale: float | None, first: Array | int = 0
) -> Array:
    """Scaled and masked scores [b, h, q, k] in the computation dtype."""
    scores = _grouped("bghqe,bgke->bghqk", query, key) * _factor(query, scale)
    if is_causal:
        scores = jnp.where(_causal_mask(query.shape[2], key.shape[2], first), scores, -jnp.inf)
    if mask is None:
        return scores
    if mask.dtype == jnp.bool_:
        return jnp.where(mask, scores, -jnp.inf)
    return scores + cast(mask, torch_dtype(scores))


def _causal_mask(queries: int, keys: int, first: Array | int) -> Array:
    """The causal mask: True if query q attends to key k, that is k <= first + q."""
    query, key = (lax.broadcasted_iota(jnp.int32, (queries, keys), axis) for axis in (0, 1))
    return key <= query + first


def _weigh_values(weights: Array, value: Array) -> Array:
    return _grouped("bghqk,bgkv->bghqv", weights, value)


def _grouped(subscripts: str, left: Array, right: Array) -> Array:
    """A product of `left` [b, h, ...] with `right` [b, g, ...]; every h/g heads of `left` share one of `right`."""
    batch, heads, *rest = left.shape
    groups = right.shape[1]
    if heads > groups and left.shape[2] > _QUERY_BLOCK:
        right = jnp.repeat(right, heads // groups, 1)
        groups = heads
    if heads == groups:
        return _product(subscripts.replace("bghq", "bgq"), left, right)
    product = _product(subscripts, left.reshape(batch, groups, heads // groups, *rest), right)
    return product.reshape(batch, heads, *product.shape[3:])


def _over_groups(subscripts: str, left: Array, right: Array, groups: int) -> Array:
    """A product of `left` and `right` [b, h, ...] summed over the heads that share a key head."""
    if left.shape[1] == groups:
        return _product(subscripts.replace("bghq", "bgq"), left, right)
    batch, heads, *_ = left.shape
    split = (batch, groups, heads // groups)
    return _product(subscripts, left.reshape(*split, *left.shape[2:]), right.reshape(*split, *right.shape[2:]))


def _product(subscripts: str, left: Array, right: Array) -> Array:
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(left))]
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
