"""Models of images and text together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.architecture import Architecture, build_from_config

_TEXT: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_TOWERS: Mapping[str, Any] = {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 24}
_IMAGE_TOKEN = 90
_IMAGE_TOKENS = 16


def _pair() -> dict[str, Any]:
    tokens = torch.randint(5, 90, (2, 11))
    tokens[:, -1] = 2
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 32, 32)}


def _pair_without_mask() -> dict[str, Any]:
    pair = _pair()
    del pair["attention_mask"]
    return pair


def _image_in_prompt() -> dict[str, Any]:
    words = torch.randint(5, 80, (1, 6))
    picture = torch.full((1, _IMAGE_TOKENS), _IMAGE_TOKEN)
    return {"input_ids": torch.cat([picture, words], dim=1), "pixel_values": torch.randn(1, 3, 32, 32)}


def _joint(name: str, model: str, config: str, inputs: Any, settings: Mapping[str, Any], **fields: Any) -> Architecture:
    build = build_from_config("transformers", model, config, inputs, settings)
    return Architecture(name, build, "multimodal", **fields)


ARCHITECTURES: tuple[Architecture, ...] = (
    _joint("clip", "CLIPModel", "CLIPConfig", _pair, _TOWERS),
    _joint("siglip", "SiglipModel", "SiglipConfig", _pair_without_mask, _TOWERS),
    _joint("blip-captioning", "BlipForConditionalGeneration", "BlipConfig", _pair, _TOWERS),
    _joint(
        "blip-retrieval", "BlipForImageTextRetrieval", "BlipConfig", _pair, {**_TOWERS, "image_text_hidden_size": 16}
    ),
    _joint(
        "llava",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        _image_in_prompt,
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_index": _IMAGE_TOKEN,
        },
        graphs=4,
        graphs_reason="a check that image features fit the image tokens reads a tensor with item()",
    ),
)
