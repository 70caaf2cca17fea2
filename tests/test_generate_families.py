"""transformers' `generate` as it is, for ten families: few programs and captures, whatever the lengths, and eager's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs
from tests.lists import quick

VOCABULARY = 61
LENGTHS = (26, 8, 12, 40)
NEW_TOKENS = 4

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "head_dim": 4,
}
_PLAIN = {name: value for name, value in _BASE.items() if name != "head_dim"}
_WHISPER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "max_target_positions": 128,
    "begin_suppress_tokens": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5: Mapping[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}

# How many programs and captures each may have. Six programs: a prompt's and a token's of the first sizes, for which Dynamo
# captures graphs of their own, then buckets of prompts and of caches (32 and 64). A sliding window has graphs of its own for
# caches below it, at its end, and full. T5's decoder has graphs for caches of no, one and more tokens, each at the lengths
# of its encoder.
FAMILIES: Mapping[str, tuple[Callable[[], PreTrainedModel], int, int]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**{**_PLAIN, "num_hidden_layers": 2})), 6, 4),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=4, n_positions=128, vocab_size=VOCABULARY)),
        6,
        4,
    ),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**_PLAIN)), 6, 4),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**_BASE)), 6, 4),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**_PLAIN, sliding_window=16)), 7, 7),
    "mixtral": (
        lambda: MixtralForCausalLM(MixtralConfig(**_PLAIN, num_local_experts=4, num_experts_per_tok=2)),
        6,
        4,
    ),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**_BASE)), 6, 4),
    "gemma3": (
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **{**_BASE, "num_hidden_layers": 2},
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
            )
        ),
        9,
        8,
    ),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**_T5, vocab_size=VOCABULARY, decoder_start_token_id=0)), 9, 6),
    "whisper": (lambda: WhisperForConditionalGeneration(WhisperConfig(**_WHISPER)), 6, 4),
}


def _inputs(name: str, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (1, length))
    if name == "whisper":
        return {"input_features": torch.randn(1, 8, 64), "decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", quick(FAMILIES, "mixtral", "gemma3", "t5", "whisper"))
def test_programs_grow_with_the_logarithm_of_lengths(name: str, recorder: Recorder) -> None:
    build, programs, captures = FAMILIES[name]
    net = build().eval()
    net.generation_config.eos_token_id = None
    prompts = [_inputs(name, length) for length in LENGTHS]
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    expected = [net.generate(**prompt, **settings) for prompt in prompts]
    before = recorder.snapshot()
    net.forward = torch.compile(net.forward, backend="dynaxla")
    with eager_programs():
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert torch.equal(net.generate(**prompt, **settings), tokens)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.eager_ops == before.eager_ops
    assert len(after.captured) - len(before.captured) <= captures
    assert 0 < after.compiles - before.compiles <= programs
