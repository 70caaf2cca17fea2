"""Denoisers and autoencoders of diffusers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo.architecture import SEED, Architecture, Build, Built, Inputs, build_from_settings, finish

_AUTOENCODER: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": 32,
}


def _diffusion(name: str, model: str, inputs: Inputs, settings: Mapping[str, Any], **fields: Any) -> Architecture:
    return Architecture(name, build_from_settings("diffusers", model, inputs, settings), "diffusion", **fields)


def _unet_inputs() -> dict[str, Any]:
    return {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([11, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
    }


def _unconditional_inputs() -> dict[str, Any]:
    return {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([11, 700])}


def _dit_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([11, 700]),
        "class_labels": torch.tensor([3, 8]),
    }


def _flux_inputs() -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    image_ids = torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1)
    return {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.7]),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(7, 3),
    }


def _sd3_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([11, 700]),
    }


def _pixart_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 7)
    mask[1, 5:] = 0
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([11, 700]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, 32),
    }


class _Method(nn.Module):
    """One method of an autoencoder as a module whose forward takes one tensor."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        super().__init__()
        self.owner = owner
        self.method = method

    def forward(self, images: torch.Tensor) -> Any:
        return getattr(self.owner, self.method)(images)


# Batch 2: at batch 1, PyTorch's own aot_eager fails in the attention's group norm ("Expected X.is_contiguous").
def _autoencoder(method: str, shape: tuple[int, ...]) -> Build:
    def build(dtype: torch.dtype) -> Built:
        diffusers = importlib.import_module("diffusers")
        torch.manual_seed(SEED)
        net = _Method(diffusers.AutoencoderKL(**_AUTOENCODER), method)
        return finish(net, (torch.randn(shape),), {}, dtype)

    return build


ARCHITECTURES: tuple[Architecture, ...] = (
    _diffusion(
        "unet-2d-condition",
        "UNet2DConditionModel",
        _unet_inputs,
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "cross_attention_dim": 24,
            "attention_head_dim": 8,
            "norm_num_groups": 8,
        },
    ),
    _diffusion(
        "unet-2d",
        "UNet2DModel",
        _unconditional_inputs,
        {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "attention_head_dim": 8,
            "norm_num_groups": 8,
        },
    ),
    Architecture("autoencoder-kl-decoder", _autoencoder("decode", (2, 4, 16, 16)), "diffusion"),
    Architecture("autoencoder-kl-encoder", _autoencoder("encode", (2, 3, 32, 32)), "diffusion"),
    _diffusion(
        "dit",
        "DiTTransformer2DModel",
        _dit_inputs,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": 16,
            "num_embeds_ada_norm": 100,
            "norm_num_groups": 4,
        },
    ),
    _diffusion(
        "flux",
        "FluxTransformer2DModel",
        _flux_inputs,
        {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
    ),
    _diffusion(
        "stable-diffusion-3",
        "SD3Transformer2DModel",
        _sd3_inputs,
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
    ),
    _diffusion(
        "pixart",
        "PixArtTransformer2DModel",
        _pixart_inputs,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_size": 16,
            "patch_size": 2,
            "caption_channels": 32,
            "use_additional_conditions": False,
        },
    ),
    _diffusion(
        "sana",
        "SanaTransformer2DModel",
        lambda: {key: value for key, value in _pixart_inputs().items() if key != "added_cond_kwargs"},
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 16,
            "patch_size": 1,
        },
    ),
    _diffusion(
        "wan-video",
        "WanTransformer3DModel",
        _video_inputs,
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
    ),
)
