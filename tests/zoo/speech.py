"""Speech and audio models: raw waveforms and spectrograms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.architecture import Architecture, build_from_config

_WAVE_SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 30,
    "mask_time_prob": 0.0,
}


def _waveform() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def _speech(
    name: str, model: str, config: str, inputs: Any, settings: Mapping[str, Any], **fields: Any
) -> Architecture:
    return Architecture(name, build_from_config("transformers", model, config, inputs, settings), "speech", **fields)


def _spectrogram() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(0, 60, (2, 10))}


def _patches() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 48, 16)}


_WHISPER: Mapping[str, Any] = {
    "vocab_size": 60,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    _speech("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _waveform, _WAVE_SIZES),
    _speech("hubert", "HubertModel", "HubertConfig", _waveform, _WAVE_SIZES),
    _speech("wavlm", "WavLMModel", "WavLMConfig", _waveform, {**_WAVE_SIZES, "num_buckets": 16}),
    _speech("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _spectrogram, _WHISPER),
    _speech(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        "ASTConfig",
        _patches,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "patch_size": 8,
            "max_length": 48,
            "num_mel_bins": 16,
            "time_stride": 6,
            "frequency_stride": 6,
        },
    ),
)
