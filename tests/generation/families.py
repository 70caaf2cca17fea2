"""Small models of the families that transformers' `generate` is tried with, and what each is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 61

Inputs = dict[str, Any]

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN = {name: value for name, value in _BASE.items() if name != "head_dim"}
_TOKENS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_ENCODER_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    **_TOKENS,
}
_SPEECH: Mapping[str, Any] = {
    **_ENCODER_DECODER,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "max_target_positions": 512,
    "begin_suppress_tokens": None,
}
_T5: Mapping[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
_MAMBA: Mapping[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_MAMBA2_HEADS: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_chunk_size": 16,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Family:
    """A model to generate with.

    Attributes:
        build: the net, of random weights.
        reads: what a prompt is for it: "text"; "source" (an encoder's, of as many tokens); "speech" (an encoder's, of a fixed
            length, and a prompt); or the model whose pictures it takes beside text.
    """

    build: Callable[[], PreTrainedModel]
    reads: str = "text"

    def net(self) -> PreTrainedModel:
        """In eval mode; generates as many tokens as it is asked for."""
        torch.manual_seed(3)
        net = self.build().eval()
        net.generation_config.eos_token_id = None
        net.generation_config.pad_token_id = 0
        return net

    def inputs(self, length: int, batch: int = 1) -> Inputs:
        """Of this many tokens; row `i` of a batch has `3 i` of padding on its left, as far as it is long enough."""
        if self.reads == "speech":
            ids = torch.randint(5, VOCABULARY, (batch, length))
            return {"input_features": torch.randn(batch, 8, 64), "decoder_input_ids": ids}
        ids = torch.randint(5, VOCABULARY - 1, (batch, length))
        mask = torch.ones_like(ids)
        for row in range(batch):
            padding = min(3 * row, length - 2)
            ids[row, :padding] = 0
            mask[row, :padding] = 0
        prompt: Inputs = {"input_ids": ids, "attention_mask": mask}
        return {**prompt, **_pictures(self.reads, prompt, batch)}


def _pictures(reads: str, prompt: Inputs, batch: int) -> Inputs:
    """Puts the places of a picture behind a row's prompt, and gives the picture."""
    if reads not in ("llava", "idefics3", "qwen2_vl"):
        return {}
    places = {"llava": 16, "idefics3": 4, "qwen2_vl": 4}[reads]
    ids = torch.cat([prompt["input_ids"], torch.full((batch, places), VOCABULARY - 1)], 1)
    mask = torch.cat([prompt["attention_mask"], torch.ones((batch, places), dtype=torch.int64)], 1)
    more: Inputs = {"input_ids": ids, "attention_mask": mask}
    if reads == "llava":
        return {**more, "pixel_values": torch.randn(batch, 3, 16, 16)}
    if reads == "idefics3":
        return {**more, "pixel_values": torch.randn(batch, 1, 3, 16, 16)}
    grid = torch.tensor([[1, 4, 4]] * batch)
    types = (ids == VOCABULARY - 1).int()
    return {
        **more,
        "pixel_values": torch.randn(batch * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": grid,
        "mm_token_type_ids": types,
    }


def _causal(name: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    return _of(f"{name}ForCausalLM", f"{name}Config", **settings)


def _of(model: str, config: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        net: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return net

    return build


TEN: Mapping[str, Family] = {
    "llama": Family(_causal("Llama", **_PLAIN)),
    "gpt2": Family(
        _of(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=512,
            vocab_size=VOCABULARY,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "qwen2": Family(_causal("Qwen2", **_PLAIN)),
    "qwen3": Family(_causal("Qwen3", **_BASE)),
    "mistral": Family(_causal("Mistral", **_PLAIN, sliding_window=512)),
    "mixtral": Family(_causal("Mixtral", **_PLAIN, num_local_experts=4, num_experts_per_tok=2)),
    "gemma2": Family(_causal("Gemma2", **_BASE, sliding_window=512)),
    "gemma3": Family(
        _of(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **_BASE,
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "t5": Family(
        _of("T5ForConditionalGeneration", "T5Config", **_T5, vocab_size=VOCABULARY, decoder_start_token_id=0), "source"
    ),
    "whisper": Family(_of("WhisperForConditionalGeneration", "WhisperConfig", **_SPEECH), "speech"),
}
"""The families that the counts are promised for."""

MORE: Mapping[str, Family] = {
    "mistral_window": Family(_causal("Mistral", **_PLAIN, sliding_window=48)),
    "gemma3_window": Family(
        _of(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **_BASE,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "bart": Family(_of("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER), "source"),
    "marian": Family(_of("MarianMTModel", "MarianConfig", **_ENCODER_DECODER), "source"),
    "mamba": Family(_causal("Mamba", **_MAMBA)),
    "mamba2": Family(_causal("Mamba2", **_MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=16)),
    "jamba": Family(
        _causal(
            "Jamba",
            **_PLAIN,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    ),
    "bamba": Family(_causal("Bamba", **_PLAIN, **_MAMBA2_HEADS, attn_layer_indices=[1])),
    "falcon_h1": Family(_causal("FalconH1", **_BASE, **_MAMBA2_HEADS, mamba_d_ssm=32)),
    "qwen3_next": Family(
        _causal(
            "Qwen3Next",
            **_BASE,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    ),
    "lfm2": Family(_causal("Lfm2", **_PLAIN, layer_types=["conv", "full_attention"])),
    "recurrent_gemma": Family(
        _causal(
            "RecurrentGemma", **_PLAIN, lru_width=16, attention_window_size=48, block_types=["recurrent", "attention"]
        )
    ),
    "llava": Family(
        lambda: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**_VISION),
                text_config=transformers.LlamaConfig(**_PLAIN),
                image_token_id=VOCABULARY - 1,
                vision_feature_layer=-1,
            )
        ),
        "llava",
    ),
    "idefics3": Family(
        lambda: transformers.Idefics3ForConditionalGeneration(
            transformers.Idefics3Config(
                vision_config=transformers.Idefics3VisionConfig(**_VISION),
                text_config=transformers.LlamaConfig(**_PLAIN),
                image_token_id=VOCABULARY - 1,
                scale_factor=2,
            )
        ),
        "idefics3",
    ),
    "smolvlm": Family(
        lambda: transformers.SmolVLMForConditionalGeneration(
            transformers.SmolVLMConfig(
                vision_config=transformers.SmolVLMVisionConfig(**_VISION),
                text_config=transformers.LlamaConfig(**_PLAIN),
                image_token_id=VOCABULARY - 1,
                scale_factor=2,
            )
        ),
        "idefics3",
    ),
    "qwen2_vl": Family(
        lambda: transformers.Qwen2VLForConditionalGeneration(
            transformers.Qwen2VLConfig(
                vision_config={
                    "depth": 1,
                    "embed_dim": 16,
                    "hidden_size": 16,
                    "num_heads": 4,
                    "mlp_ratio": 2,
                    "patch_size": 4,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                },
                text_config={**_PLAIN, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
                image_token_id=VOCABULARY - 1,
                vision_start_token_id=3,
                vision_end_token_id=4,
                video_token_id=5,
            )
        ),
        "qwen2_vl",
    ),
}
"""Others that `generate` is tried with: short windows, encoder-decoder, state spaces, hybrids, pictures."""

FAMILIES: Mapping[str, Family] = {**TEN, **MORE}
