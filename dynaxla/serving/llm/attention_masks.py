"""Attention masks over the positions of a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dynaxla.errors import OptionError
from dynaxla.serving.llm.slot_attention import NAME, attention_of

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class AttentionWindows:
    """The sliding windows of a model's layers.

    Attributes:
        by_kind: positions by transformers' kind of layer; None: all. One kind: all layers get the one mask.
        additive: masks are added to the scores (transformers' "eager"), not bool.
    """

    by_kind: Mapping[str, int | None]
    additive: bool

    def masks(self, positions: Tensor, kv_length: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Masks [rows, 1, q, reach] for tokens at these positions [rows, q]; a dict where kinds of layers differ."""
        made = {kind: self._mask(positions, kv_length, window, dtype) for kind, window in self.by_kind.items()}
        return made if len(made) > 1 else next(iter(made.values()))

    def _mask(self, positions: Tensor, kv_length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        seen, asking = torch.arange(kv_length, device=positions.device), positions[:, None, :, None]
        sees = seen <= asking
        if window is not None:
            sees = sees & (seen > asking - window)
        if not self.additive:
            return sees
        return torch.where(sees, 0.0, torch.finfo(dtype).min).to(dtype)


def windows_of_config(config: PreTrainedConfig) -> AttentionWindows:
    """What a model's config says.

    Raises:
        OptionError: a layer that sees otherwise, or an attention whose masks are none of these.
    """
    text, how = config.get_text_config(), attention_of(config)
    if how not in ("sdpa", "eager", NAME):
        raise OptionError(f"the attention {how!r} is not supported", 'load the model with attn_implementation="sdpa"')
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or (_KINDS[window is not None],)
    if strange := set(kinds) - set(_KINDS):
        raise OptionError(f"layers of the kind {min(strange)!r} are not served", f"served are {' and '.join(_KINDS)}")
    sizes = {_KINDS[0]: None, _KINDS[1]: window}
    return AttentionWindows({kind: sizes[kind] for kind in dict.fromkeys(kinds)}, additive=how == "eager")
