"""The attention of one new token per row, as sums of products that XLA fuses with the window of the cache it reads.

A batched product would have its operands copied first: the part of each slot's room that is in reach, repeated for every
query head of a group. On a CPU that costs several times what the attention does (docs/serving_llm.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "dynaxla_slots"
_KNOWN = frozenset({"position_ids", "sliding_window", "use_cache", "is_causal", "output_attentions", "cache_position"})


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' "sdpa" gives, to rounding; all but masked queries of one token in a captured graph go there.

    Args:
        query: [rows, query heads, q, head_dim].
        key, value: [rows, heads, reach, head_dim].
        attention_mask: bool [rows, 1, q, reach].

    Returns:
        [rows, q, query heads, head_dim], and no weights.
    """
    plain = not dropout and attention_mask is not None and attention_mask.dtype == torch.bool
    unknown = any(value is not None for name, value in rest.items() if name not in _KNOWN)
    if query.shape[2] != 1 or not plain or unknown or not torch.compiler.is_compiling():
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **rest)
    assert attention_mask is not None
    rows, heads, _, dim = key.shape
    group = query.shape[1] // heads
    scale = dim**-0.5 if scaling is None else scaling
    asked = query.reshape(rows, heads, group, 1, dim).float()
    scores = (asked * key[:, :, None].float()).sum(-1) * scale
    weights = scores.masked_fill(~attention_mask, float("-inf")).softmax(-1)
    mixed = (weights[..., None] * value[:, :, None].float()).sum(-2).to(query.dtype)
    return mixed.reshape(rows, 1, heads * group, value.shape[-1]), None


def use_slot_attention(model: PreTrainedModel) -> None:
    """Sets the model's attention where it is "sdpa"; elsewhere it stays what it is."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
