"""Scaled dot-product attention, forward and backward.

For 16-bit floats, scores and sums are float32, as in torch's fused kernels; the products take operands of the input
dtype, as a TPU's matrix unit does. A query that attends to no key gives zeros, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.bucketing.pad_rules import attention as attention_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops import aten_forms, splash_attention
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.promotion import JNP_DTYPES, cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import Body, OpFamily
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


def attention_on_tpu(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """As `attention`, by a kernel where one takes the call."""
    if mask is None and has_kernel(query, key):
        return splash_attention.attend(query, key, value, None, is_causal, scale_factor(query, scale))
    return attention(query, key, value, mask, is_causal, scale)


@OPS.op(internal.ATTENTION, pad=attention_rules.attention, as_aten=aten_forms.attention, on_tpu=attention_on_tpu)
def attention(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """Attention of query [b, h, q, e] to key [b, g, k, e] and value [b, g, k, v], where g divides h.

    Returns:
        The output [b, h, q, v], and the logsumexp of the scores [b, h, q] in the computation dtype (minus infinity for a
        query that attends to no key), which the backward pass reads.
    """
    if _needs_blocks(query, key):
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
    starts, (queries,), masks = _blocks([query], mask)

    def attend(block: Any) -> tuple[Array, Array]:
        first, some, its_mask = block
        return _attend(some, key, value, mask if its_mask is None else its_mask, is_causal, scale, first)

    output, logsumexp = lax.map(attend, (starts, queries, masks))
    length = query.shape[2]
    return _join(output, length), _join(logsumexp[..., None], length)[..., 0]


def _needs_blocks(query: Array, key: Array) -> bool:
    return query.shape[2] > _QUERY_BLOCK and 4 * math.prod(query.shape[:-1]) * key.shape[2] > _MAX_SCORES_BYTES


def _blocks(rows: Sequence[Array], mask: Array | None) -> tuple[Array, list[Array], Array | None]:
    """Per block of queries: the first one's position, what has a row for each query, and the mask if it has one, too.

    Args:
        rows: [b, h, q, n]. Those of the last block are filled up with zeros, whose gradients are zero.
    """
    length = rows[0].shape[2]
    count = -(-length // _QUERY_BLOCK)

    def split(x: Array) -> Array:
        """Pads and reshapes [..., queries, n] to [blocks, ..., queries per block, n]."""
        widths = [(0, 0)] * (x.ndim - 2) + [(0, count * _QUERY_BLOCK - length), (0, 0)]
        blocks = jnp.pad(x, widths).reshape(*x.shape[:-2], count, _QUERY_BLOCK, x.shape[-1])
        return jnp.moveaxis(blocks, -3, 0)

    starts = jnp.arange(count, dtype=jnp.int32) * _QUERY_BLOCK
    masks = split(mask) if mask is not None and mask.shape[-2] == length else None
    return starts, [split(each) for each in rows], masks


def _join(blocks: Array, length: int) -> Array:
    """[b, h, q, n] of [blocks, b, h, queries per block, n], without the rows that fill up the last block."""
    rows = jnp.moveaxis(blocks, 0, 2)
    return lax.collapse(rows, 2, 4)[:, :, :length]


def attention_backward_on_tpu(
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
    """As `attention_backward`, by a kernel where one takes the call."""
    if mask is None and has_kernel(query, key):
        factor = scale_factor(query, scale)
        return splash_attention.attend_backward(grad, query, key, value, None, out, logsumexp, is_causal, factor)
    return attention_backward(grad, separate(query), key, value, mask, out, logsumexp, is_causal, scale)


def separate(query: Array) -> Array:
    """A gradient's query: its scores are computed again, where one program has the forward too, and not kept until then."""
    return lax.optimization_barrier(query)  # type: ignore[no-any-return]


@OPS.op(internal.ATTENTION_BACKWARD, pad=attention_rules.attention_backward, on_tpu=attention_backward_on_tpu)
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
    rows = (grad, query, out, logsumexp[..., None])
    if _needs_blocks(query, key):
        grads = _attend_backward_in_blocks(rows, key, value, mask, is_causal, scale)
    else:
        grads = _attend_backward(rows, key, value, mask, is_causal, scale, 0)
    return tuple(each.astype(x.dtype) for each, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


def _attend_backward(
    rows: Sequence[Array],
    key: Array,
    value: Array,
    mask: Array | None,
    is_causal: bool,
    scale: float | None,
    first: Array | int,
) -> tuple[Array, Array, Array]:
    """Computes `attention_backward`, in the computation dtype; for the causal mask the first query has position `first`.

    Args:
        rows: what has a row for each query: the gradient, the query, the output and the logsumexp [b, h, q, n].
    """
    grad, query, out, logsumexp = rows
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(query))]
    shift = jnp.where(jnp.isneginf(logsumexp), 0, logsumexp)
    weights = jnp.exp(_scores(query, key, mask, is_causal, scale, first) - shift)
    correction = jnp.sum(grad.astype(wide) * out.astype(wide), -1, keepdims=True)
    slope = weights * (_grouped("bghqv,bgkv->bghqk", grad, value) - correction) * scale_factor(query, scale)
    weights, slope = weights.astype(query.dtype), slope.astype(query.dtype)
    grad_query = _grouped("bghqk,bgke->bghqe", slope, key)
    grad_key = _over_groups("bghqk,bghqe->bgke", slope, query, key.shape[1])
    grad_value = _over_groups("bghqk,bghqv->bgkv", weights, grad, key.shape[1])
    return grad_query, grad_key, grad_value


def _attend_backward_in_blocks(
    rows: Sequence[Array], key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array, Array]:
    """Computes `attention_backward` per block of queries, over which the gradients of keys and values are summed."""
    length = rows[0].shape[2]
    starts, blocks, masks = _blocks(rows, mask)

    def add_block(sums: tuple[Array, Array], block: Any) -> tuple[tuple[Array, Array], Array]:
        first, its_rows, its_mask = block
        of_query, *others = _attend_backward(
            its_rows, key, value, mask if its_mask is None else its_mask, is_causal, scale, first
        )
        return (sums[0] + others[0], sums[1] + others[1]), of_query

    wide = JNP_DTYPES[opmath_dtype(torch_dtype(key))]
    zeros = jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide)
    sums, of_queries = lax.scan(add_block, zeros, (starts, blocks, masks))
    return _join(of_queries, length), *sums


def has_kernel(query: Array, key: Array) -> bool:
    """Whether a TPU's kernels compute attention of these, without a mask."""
    return splash_attention.takes(query.shape, key.shape, str(query.dtype))


def _for_cpu(attend: Body) -> Body:
    """The body of torch's op of the CPU."""

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
        return attend(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-any-return]

    return flash_attention_for_cpu


def _for_cpu_backward(attend: Body) -> Body:
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
        return attend(grad_out, query, key, value, attn_mask, out, logsumexp, is_causal, scale)  # type: ignore[no-any-return]

    return flash_attention_for_cpu_backward


OPS.op(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    check=check_attention,
    pad=attention_rules.attention,
    limits="without dropout",
    as_aten=aten_forms.flash_attention_for_cpu,
    on_tpu=_for_cpu(attention_on_tpu),
)(_for_cpu(attention))
OPS.op(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    check=check_attention,
    pad=attention_rules.attention_backward,
    limits="without dropout",
    on_tpu=_for_cpu_backward(attention_backward_on_tpu),
)(_for_cpu_backward(attention_backward))


def scale_factor(query: Array, scale: float | None) -> float:
    """By what scores are multiplied."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(
    query: Array, key: Array, mask: Array | None, is_causal: bool, scale: float | None, first: Array | int = 0
) -> Array:
    """Scaled and masked scores [b, h, q, k] in the computation dtype."""
    factor, is_wide = scale_factor(query, scale), query.dtype in (jnp.float32, jnp.float64)
    # Scores have two readers, so that a factor of theirs would be a pass of its own over them.
    scores = _grouped("bghqe,bgke->bghqk", query * factor if is_wide else query, key)
    scores = scores if is_wide else scores * factor
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
