"""Language models: encoders, decoders with caches, encoder-decoders, mixtures of experts, state spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.architecture import FLOAT32_ONLY, SEED, Architecture, Build, Built, Inputs, build_from_config, finish

VOCABULARY = 97
BATCH = 2
LENGTH = 13

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_GROUPED: Mapping[str, Any] = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}


def _tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, length))


def _right_padding(length: int = LENGTH) -> torch.Tensor:
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, length - 3 :] = 0
    return mask


def _left_padding() -> torch.Tensor:
    return _right_padding().flip(1)


def encoder_inputs() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": _right_padding()}


def _decoder_inputs() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": _left_padding(), "use_cache": True}


def _unmasked_inputs() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": True}


def _token_inputs() -> dict[str, Any]:
    return {"input_ids": _tokens()}


def _encoder_decoder_inputs() -> dict[str, Any]:
    return {**encoder_inputs(), "decoder_input_ids": _tokens(10), "use_cache": True}


def _text(
    name: str, model: str, config: str, inputs: Inputs, settings: Mapping[str, Any], **fields: Any
) -> Architecture:
    return Architecture(name, build_from_config("transformers", model, config, inputs, settings), "text", **fields)


def _encoder(name: str, prefix: str, head: str = "Model", **settings: Any) -> Architecture:
    return _text(name, prefix + head, prefix + "Config", encoder_inputs, {**_SIZES, **settings})


def _decoder(name: str, prefix: str, config: str = "", **settings: Any) -> Architecture:
    return _text(name, prefix + "ForCausalLM", config or prefix + "Config", _decoder_inputs, {**_GROUPED, **settings})


_ENCODERS = (
    _encoder("bert", "Bert", "ForMaskedLM"),
    _encoder("bert-sequence-classification", "Bert", "ForSequenceClassification", num_labels=3),
    _encoder("roberta", "Roberta"),
    _encoder("xlm-roberta-token-classification", "XLMRoberta", "ForTokenClassification"),
    _encoder("distilbert", "DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    _encoder("albert", "Albert", embedding_size=16),
    _encoder("electra", "Electra", embedding_size=16),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _text(
        "deberta",
        "DebertaModel",
        "DebertaConfig",
        encoder_inputs,
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        graphs=12,
        graphs_reason="the slice of relative positions has bounds that are tensors",
    ),
    _encoder("modernbert", "ModernBert", "ForMaskedLM", pad_token_id=0, local_attention=4),
    _encoder("mpnet", "MPNet"),
    _text(
        "xlm",
        "XLMModel",
        "XLMConfig",
        encoder_inputs,
        {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        graphs=2,
        graphs_reason="an assert reads the largest length with item()",
    ),
    _encoder("roformer", "RoFormer", embedding_size=32),
    _encoder("squeezebert", "SqueezeBert", embedding_size=32),
    _encoder("convbert", "ConvBert", embedding_size=32, conv_kernel_size=3),
    _encoder("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _encoder("esm", "Esm", pad_token_id=1, position_embedding_type="rotary"),
    _text(
        "funnel",
        "FunnelModel",
        "FunnelConfig",
        encoder_inputs,
        {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
    ),
    _text(
        "longformer",
        "LongformerModel",
        "LongformerConfig",
        encoder_inputs,
        {**_SIZES, "attention_window": 4},
        graphs=6,
        graphs_reason="whether any token attends globally is read with item(), in every layer",
    ),
    _encoder("big-bird", "BigBird", attention_type="original_full"),
    _text(
        "xlnet",
        "XLNetModel",
        "XLNetConfig",
        encoder_inputs,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    _text(
        "fnet",
        "FNetModel",
        "FNetConfig",
        _token_inputs,
        _SIZES,
        dtypes=FLOAT32_ONLY,
        dtypes_reason="torch.fft takes no bfloat16",
    ),
)

_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
_OLD_NAMES = {"bos_token_id": 1, "eos_token_id": 2}

_DECODERS = (
    _text("gpt2", "GPT2LMHeadModel", "GPT2Config", _decoder_inputs, {**_GPT2_SIZES, **_OLD_NAMES}),
    _text("gpt-bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", _decoder_inputs, {**_GPT2_SIZES, **_OLD_NAMES}),
    _text("gptj", "GPTJForCausalLM", "GPTJConfig", _decoder_inputs, {**_GPT2_SIZES, **_OLD_NAMES, "rotary_dim": 4}),
    _text(
        "gpt-neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _decoder_inputs,
        {
            **_SIZES,
            **_OLD_NAMES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    _decoder("gpt-neox", "GPTNeoX"),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral", sliding_window=6),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=8),
    _decoder("gemma", "Gemma", head_dim=8),
    _decoder("gemma2", "Gemma2", head_dim=8, sliding_window=6),
    _decoder("gemma3", "Gemma3", "Gemma3TextConfig", head_dim=8, sliding_window=6),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3"),
    _decoder("opt", "OPT", ffn_dim=48, word_embed_proj_dim=32),
    _decoder("bloom", "Bloom", n_layer=2, n_head=4),
    _decoder("falcon", "Falcon"),
    _decoder("olmo2", "Olmo2"),
    _decoder("stablelm", "StableLm"),
    _decoder("cohere", "Cohere"),
    _decoder("starcoder2", "Starcoder2"),
    _decoder("granite", "Granite"),
    _decoder("glm", "Glm", head_dim=8),
    _decoder("smollm3", "SmolLM3"),
    _decoder("nemotron", "Nemotron"),
    _decoder("biogpt", "BioGpt"),
    _text(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        _decoder_inputs,
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 64},
    ),
)

_SEQ2SEQ: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _seq2seq(name: str, model: str, config: str, settings: Mapping[str, Any]) -> Architecture:
    return _text(name, model, config, _encoder_decoder_inputs, settings)


_ENCODER_DECODERS = (
    _seq2seq("t5", "T5ForConditionalGeneration", "T5Config", _T5),
    _seq2seq("mt5", "MT5ForConditionalGeneration", "MT5Config", {**_T5, "feed_forward_proj": "gated-gelu"}),
    _seq2seq("bart", "BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    _seq2seq("marian", "MarianMTModel", "MarianConfig", _SEQ2SEQ),
    _seq2seq("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ),
    _seq2seq("mbart", "MBartForConditionalGeneration", "MBartConfig", _SEQ2SEQ),
    _seq2seq("m2m-100", "M2M100ForConditionalGeneration", "M2M100Config", _SEQ2SEQ),
)

_EXPERTS = (
    _decoder("mixtral", "Mixtral", num_local_experts=4),
    _decoder("qwen2-moe", "Qwen2Moe", num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24),
    _decoder("qwen3-moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
    _decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder("gpt-oss", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6),
    _decoder(
        "deepseek-v3",
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
)

_STATE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}

_STATE_SPACES = (
    _text("mamba", "MambaForCausalLM", "MambaConfig", _unmasked_inputs, _STATE),
    _text("falcon-mamba", "FalconMambaForCausalLM", "FalconMambaConfig", _unmasked_inputs, _STATE),
    _text(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _unmasked_inputs,
        {**_STATE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    _text("rwkv", "RwkvForCausalLM", "RwkvConfig", _unmasked_inputs, {**_STATE, "context_length": 64}),
    _decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
)


def _build_decode_step(prefix: str) -> Build:
    """One token against a preallocated cache that a prefill has filled: the inner loop of text generation."""

    def build(dtype: torch.dtype) -> Built:
        import transformers

        torch.manual_seed(SEED)
        config = getattr(transformers, prefix + "Config")(**_GROUPED)
        net = getattr(transformers, prefix + "ForCausalLM")(config)
        net, _, _ = finish(net, (), {}, dtype)
        cache = transformers.StaticCache(config=config, max_cache_len=16)
        with torch.no_grad():
            net(input_ids=_tokens(9), past_key_values=cache, use_cache=True)
        return net, (), {"input_ids": _tokens(1), "past_key_values": cache, "use_cache": True}

    return build


_DECODE_STEPS = (
    Architecture("llama-decode-step", _build_decode_step("Llama"), "text"),
    Architecture("qwen3-decode-step", _build_decode_step("Qwen3"), "text"),
)

ARCHITECTURES: tuple[Architecture, ...] = (
    *_ENCODERS,
    *_DECODERS,
    *_ENCODER_DECODERS,
    *_EXPERTS,
    *_STATE_SPACES,
    *_DECODE_STEPS,
)
