"""Rewrites torch.nn's fused inference paths of transformers to plain ops while AOTAutograd traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten

_SOURCE_MASK, _PADDING_MASK = 0, 1  # torch's constants; 2 is a mask per batch and head


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Computes the layer for src [batch, length, embed_dim]; True in the mask excludes a position from attention."""

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the output and, if requested, the weights, as torch's fused kernel does."""
    pairs = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in pairs)
    scores = (q * (embed_dim // num_head) ** -0.5) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(_expand_mask(mask, mask_type), -torch.inf)
    weights = torch.softmax(scores, -1)
    output = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _expand_mask(mask: Tensor, mask_type: int | None) -> Tensor:
    mask = mask.to(torch.bool)
    if mask_type == _PADDING_MASK:
        return mask[:, None, None, :]
    return mask[None, None] if mask_type == _SOURCE_MASK and mask.dim() == 2 else mask


FAST_PATH_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor | tuple[Tensor, Tensor | None]]] = MappingProxyType(
    {
        aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
        aten._native_multi_head_attention.default: multi_head_attention,
    }
)
