"""Vision models: transformers over patches, convolutional networks, segmentation and detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.architecture import FLOAT32_ONLY, Architecture, build_from_config

_PATCHES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 7,
}
_BACKBONE: Mapping[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
_DETR: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 6,
    "num_labels": 5,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": _BACKBONE,
}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _large_image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def _vision(
    name: str, model: str, config: str, settings: Mapping[str, Any], *, large: bool = False, **fields: Any
) -> Architecture:
    inputs = _large_image if large else _image
    return Architecture(name, build_from_config("transformers", model, config, inputs, settings), "vision", **fields)


_ROUNDING = (
    "many layers with random weights turn bfloat16's rounding into errors over 15 percent in eager PyTorch itself"
)


_TRANSFORMERS = (
    _vision("vit", "ViTForImageClassification", "ViTConfig", _PATCHES),
    _vision("deit", "DeiTForImageClassification", "DeiTConfig", _PATCHES),
    _vision(
        "beit",
        "BeitForImageClassification",
        "BeitConfig",
        {**_PATCHES, "use_relative_position_bias": True, "layer_scale_init_value": 0.1},
    ),
    _vision("dinov2", "Dinov2ForImageClassification", "Dinov2Config", _PATCHES),
    _vision("dinov3-vit", "DINOv3ViTModel", "DINOv3ViTConfig", {**_PATCHES, "num_register_tokens": 2}),
    _vision(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    _vision(
        "swinv2",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    _vision(
        "pvt",
        "PvtForImageClassification",
        "PvtConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 7,
        },
        large=True,
    ),
    _vision(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "num_labels": 5},
        large=True,
    ),
    _vision(
        "mobilevit",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 4,
        },
        large=True,
        dtypes=FLOAT32_ONLY,
        dtypes_reason=_ROUNDING,
    ),
    _vision(
        "yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        {**_PATCHES, "image_size": [32, 32], "num_detection_tokens": 5},
    ),
    _vision("detr", "DetrForObjectDetection", "DetrConfig", _DETR, large=True),
    _vision("conditional-detr", "ConditionalDetrForObjectDetection", "ConditionalDetrConfig", _DETR, large=True),
    _vision(
        "dpt",
        "DPTForSemanticSegmentation",
        "DPTConfig",
        {
            **_PATCHES,
            "num_hidden_layers": 4,
            "is_hybrid": False,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
    ),
)

_CONVOLUTIONAL = (
    _vision(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "bottleneck"},
    ),
    _vision(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    _vision(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    _vision(
        "mobilenet-v1",
        "MobileNetV1ForImageClassification",
        "MobileNetV1Config",
        {"image_size": 64, "depth_multiplier": 0.25},
        large=True,
        dtypes=FLOAT32_ONLY,
        dtypes_reason=_ROUNDING,
    ),
    _vision(
        "mobilenet-v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 64, "depth_multiplier": 0.25},
        large=True,
        dtypes=FLOAT32_ONLY,
        dtypes_reason=_ROUNDING,
    ),
    _vision(
        "efficientnet",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {
            "image_size": 64,
            "width_coefficient": 0.25,
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 40],
            "kernel_sizes": [3, 3, 5],
            "strides": [1, 2, 2],
            "num_block_repeats": [1, 1, 2],
            "expand_ratios": [1, 6, 6],
            "depthwise_padding": [],
            "hidden_dim": 320,
        },
        large=True,
    ),
    _vision(
        "regnet",
        "RegNetForImageClassification",
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    ),
    _vision(
        "poolformer",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        large=True,
    ),
    _vision(
        "focalnet",
        "FocalNetForImageClassification",
        "FocalNetConfig",
        {
            "image_size": 32,
            "embed_dim": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    _vision(
        "bit",
        "BitForImageClassification",
        "BitConfig",
        {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 2},
    ),
)

ARCHITECTURES: tuple[Architecture, ...] = (*_TRANSFORMERS, *_CONVOLUTIONAL)
