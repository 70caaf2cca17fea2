"""Models of usual width and a few layers, in bfloat16 and without memory, for programs that are compiled and never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

TOKENS = 512
LAYERS = 2


class Built(NamedTuple):
    """A model on "meta" and the tensors of a call, which are on "meta", too.

    Attributes:
        first_written: the call writes the tensors from this one on; None: none.
    """

    model: nn.Module
    arguments: tuple[torch.Tensor, ...]
    first_written: int | None = None


class FirstResult(nn.Module):
    """A model whose call takes tensors by position and gives its first result.

    Args:
        names: of the model's parameters for these tensors.
        settings: other keywords of a call.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], **settings: Any) -> None:
        super().__init__()
        self.model, self.names, self.settings = model, names, settings

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True)), **self.settings)[0]  # type: ignore[no-any-return]


class CachedStep(nn.Module):
    """A decoder's step of one token. A call takes the token [rows, 1], its place [], and of each layer the keys and the values
    [rows, heads, places, head size], which it writes; it gives the logits [rows, 1, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: torch.Tensor, place: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=caches[0].shape[2])  # type: ignore[arg-type]
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = caches[2 * number : 2 * number + 2]
            layer.device, layer.dtype, layer.is_initialized = token.device, layer.keys.dtype, True
            layer.cumulative_length = place.clone()  # type: ignore[attr-defined]
        ids = place.view(1, 1).expand(token.shape[0], 1)
        return self.model(input_ids=token, position_ids=ids, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]


def _tokens(rows: int = 8) -> torch.Tensor:
    return torch.ones(rows, TOKENS, dtype=torch.long)


def _images(rows: int = 32) -> torch.Tensor:
    return torch.empty(rows, 3, 224, 224)


def make_bert() -> Built:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=LAYERS), add_pooling_layer=False)
    return Built(FirstResult(model, ("input_ids", "attention_mask")), (_tokens(), _tokens()))


def make_gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS))
    return Built(FirstResult(model, ("input_ids",), use_cache=False), (_tokens(),))


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
    )


def make_llama_prefill() -> Built:
    from transformers import LlamaForCausalLM

    return Built(FirstResult(LlamaForCausalLM(_llama_config()), ("input_ids",), use_cache=False), (_tokens(),))


def make_llama_decode() -> Built:
    from transformers import LlamaForCausalLM

    config, rows, places = _llama_config(), 8, 1024
    caches = [torch.empty(rows, config.num_key_value_heads, places, config.head_dim) for _ in range(2 * LAYERS)]
    arguments = (torch.ones(rows, 1, dtype=torch.long), torch.tensor(0), *caches)
    return Built(CachedStep(LlamaForCausalLM(config)), arguments, first_written=2)


def make_vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=LAYERS, num_labels=1000))
    return Built(FirstResult(model, ("pixel_values",)), (_images(),))


def make_resnet50() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(depths=[1, 2, 2, 1], num_labels=1000))
    return Built(FirstResult(model, ("pixel_values",)), (_images(),))


def make_convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(ConvNextConfig(depths=[1, 1, 2, 1], num_labels=1000))
    return Built(FirstResult(model, ("pixel_values",)), (_images(),))


def make_unet() -> Built:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(320, 640),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=768,
    )
    names = ("sample", "timestep", "encoder_hidden_states")
    call = (torch.empty(2, 4, 64, 64), torch.ones(2, dtype=torch.long), torch.empty(2, 77, 768))
    return Built(FirstResult(model, names, return_dict=False), call)


def make_moe() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    return Built(FirstResult(MixtralForCausalLM(config), ("input_ids",), use_cache=False), (_tokens(),))


def make_mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(hidden_size=768, num_hidden_layers=LAYERS, vocab_size=32000))
    return Built(FirstResult(model, ("input_ids",), use_cache=False), (_tokens()[:, :64],))


MODELS: Mapping[str, Callable[[], Built]] = {
    "bert": make_bert,
    "gpt2": make_gpt2,
    "llama-prefill": make_llama_prefill,
    "llama-decode": make_llama_decode,
    "vit": make_vit,
    "resnet50": make_resnet50,
    "convnext": make_convnext,
    "unet": make_unet,
    "moe": make_moe,
    "mamba": make_mamba,
}


def build(name: str) -> Built:
    """The model in bfloat16, in inference mode: nothing is drawn, and statistics stay."""
    with torch.device("meta"):
        built = MODELS[name]()
    arguments = (each.bfloat16() if each.is_floating_point() else each for each in built.arguments)
    return built._replace(model=built.model.eval().bfloat16(), arguments=tuple(arguments))
