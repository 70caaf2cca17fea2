"""The attention of tokens to their slots: one operator, whose products read the heads that share keys and values as they lie.

transformers repeats keys and values for every query head where there is a mask, which writes the whole cache several times
over at every layer and step; and on the device torch takes its attention apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dynaxla.custom_ops import internal

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
    """What transformers' "sdpa" gives, to rounding; calls without a mask of booleans, or outside of a captured graph, go there.

    Args:
        query: [rows, query heads, q, head_dim].
        key, value: [rows, heads, reach, head_dim].
        attention_mask: bool [rows, 1, q, reach].

    Returns:
        [rows, q, query heads, head_dim], and no weights.
    """
    plain = not dropout and attention_mask is not None and attention_mask.dtype == torch.bool
    unknown = any(value is not None for name, value in rest.items() if name not in _KNOWN)
    if not plain or unknown or not torch.compiler.is_compiling():
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **rest)
    mixed, _ = internal.ATTENTION(query, key, value, attention_mask, False, scaling)
    return mixed.transpose(1, 2), None


def attention_of(config: PreTrainedConfig) -> str:
    """The name of the attention that a model's config asks for; transformers has no public word for it."""
    return str(config._attn_implementation)


def use_slot_attention(model: PreTrainedModel) -> None:
    """Sets the model's attention where it is "sdpa"; elsewhere it stays what it is."""
    if attention_of(model.config) != "sdpa":
        return
    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
