"""Models to measure without writing any: small ones that are all overhead, and architectures at their usual size with random
weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and arguments and keywords of a call."""


def _label(config: Any) -> Any:
    config.num_labels = 1000
    return config


def make_tiny_mlp() -> Built:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (torch.randn(8, 16),), {}


def make_deep_mlp() -> Built:
    """150 parameters and no work: what a call costs per weight."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(75)]), (torch.randn(2, 8),), {}


def make_bert_base() -> Built:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), (torch.randint(0, 30000, (1, 128)),), {}


def make_gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), (torch.randint(0, 50000, (1, 128)),), {"use_cache": False}


def make_resnet50() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(_label(ResNetConfig())), (torch.randn(1, 3, 224, 224),), {}


def make_vit_base() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(_label(ViTConfig())), (torch.randn(1, 3, 224, 224),), {}


def make_llama_decode() -> Built:
    """One token of a 100M-parameter Llama with a static cache of 256 positions, 64 of them filled."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=256)
    with torch.no_grad():
        model(torch.randint(0, 32000, (1, 64)), past_key_values=cache, use_cache=True)
    return CachedStep(model, cache), (torch.tensor([[5]]), torch.tensor([[64]])), {}


class CachedStep(nn.Module):
    """A step of a decoder, the same again and again: what it added to the cache is forgotten before the next."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        self.lengths = [layer.cumulative_length for layer in cache.layers]

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Token and its position [1, 1] -> logits [1, 1, vocabulary]."""
        for length in self.lengths:
            length.fill_(64)
        output = self.model(token, past_key_values=self.cache, use_cache=True, position_ids=position)
        return output.logits  # type: ignore[no-any-return]


BUILT_IN: Mapping[str, Callable[[], Built]] = {
    "tiny-mlp": make_tiny_mlp,
    "deep-mlp": make_deep_mlp,
    "bert-base": make_bert_base,
    "gpt2": make_gpt2,
    "resnet50": make_resnet50,
    "vit-base": make_vit_base,
    "llama-100m-decode": make_llama_decode,
}
