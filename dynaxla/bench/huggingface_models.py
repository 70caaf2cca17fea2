"""Models of transformers by their config, with random weights and inputs: `hf:bert,num_hidden_layers=2,batch=4,tokens=64`.

Behind `hf:` stands a model type of transformers (`bert`), a folder or file with a config, or a name on the hub; then fields of
the config, and settings of the call: `batch` (1), `tokens` (128; of sound, frames), `dtype` (float32), and `head`, the model's
auto class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dynaxla.errors import OptionError
from dynaxla.options import require_member

PREFIX = "hf:"
SETTINGS: Mapping[str, Any] = {"batch": 1, "tokens": 128, "dtype": "float32", "head": None}
DTYPES = ("float32", "float64", "bfloat16", "float16")


def build_model(text: str, *, train: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Builds the model, arguments and keywords of a text such as "hf:gpt2,n_layer=2,tokens=64".

    Where a model is trained its dropouts are set to 0, so that two backends can be compared.

    Raises:
        OptionError: see `read_config`; or the model takes other inputs than tokens, images or sound.
    """
    config, settings = read_config(text)
    if train:
        for field, value in config.to_dict().items():
            if isinstance(value, float) and "drop" in field:
                setattr(config, field, 0.0)
    config.use_cache = False
    model = _head(config, settings["head"]).from_config(config, dtype=getattr(torch, settings["dtype"]))
    return model.train(train), (), _make_inputs(model, settings)


def read_config(text: str) -> tuple[Any, dict[str, Any]]:
    """The config of a text, and the settings of the call.

    Raises:
        OptionError: transformers is not installed; or there is no such model type, config field or setting (the message has the
            nearest).
    """
    name, *pieces = text.removeprefix(PREFIX).split(",")
    given = dict(_read_setting(text, piece) for piece in pieces)
    settings = {each: given.pop(each, default) for each, default in SETTINGS.items()}
    require_member(settings["dtype"], DTYPES, f"dtype of {text!r}:")
    config = _find_config(name)
    for field, value in given.items():
        require_member(field, [*_fields(config), *SETTINGS], f"field of {type(config).__name__}")
        setattr(config, field, value)
    return config, settings


def _find_config(name: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        raise OptionError(f"{PREFIX}{name} needs transformers", "pip install 'dynaxla[bench]'") from None
    known = list(CONFIG_MAPPING.keys())
    if name in known:
        return AutoConfig.for_model(name)
    if "/" not in name and not Path(name).exists():
        require_member(name, known, "model type of transformers")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise OptionError(
            f"transformers finds no config {name!r}: {said}", "name a model type, a folder, or a name on the hub"
        ) from None


def _fields(config: Any) -> list[str]:
    return [each for each in (*config.to_dict(), *config.attribute_map) if not each.startswith("_")]


def _head(config: Any, wanted: str | None) -> Any:
    """The auto class of the model: the one asked for, else the usual of its type."""
    import transformers
    from transformers.models.auto import modeling_auto as lists

    if wanted is not None:
        heads = [each for each in dir(transformers) if each.startswith("AutoModel")]
        require_member(wanted, heads, "head")
        return getattr(transformers, wanted)
    kind = config.model_type
    if kind in lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in lists.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if kind in lists.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return transformers.AutoModelForImageClassification
    return transformers.AutoModel


def _make_inputs(model: Any, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random inputs by the name of the model's main one."""
    config, rows, length = model.config.get_text_config(), settings["batch"], settings["tokens"]
    dtype = getattr(torch, settings["dtype"])
    main = model.main_input_name

    def draw_tokens() -> torch.Tensor:
        return torch.randint(1, min(config.vocab_size, 10_000), (rows, length))

    inputs: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        inputs[main] = draw_tokens()
    elif main == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        inputs[main] = torch.randn(rows, getattr(vision, "num_channels", 3), height, width, dtype=dtype)
        if hasattr(model.config, "vision_config") and hasattr(model.config, "text_config"):
            inputs["input_ids"] = draw_tokens()
    elif main == "input_values":
        inputs[main] = torch.randn(rows, length * 320, dtype=dtype)
    elif main == "input_features":
        frames = 2 * getattr(model.config, "max_source_positions", length)
        inputs[main] = torch.randn(rows, getattr(model.config, "num_mel_bins", 80), frames, dtype=dtype)
    else:
        raise OptionError(f"{type(model).__name__} takes {main!r}, and bench makes no such inputs", "write a factory")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw_tokens()
    return inputs


def _read_setting(text: str, piece: str) -> tuple[str, Any]:
    name, equals, value = piece.partition("=")
    if not equals or not name.strip():
        raise OptionError(
            f"{piece!r} in {text!r} is no field", f"write NAME=VALUE, as in {PREFIX}bert,num_hidden_layers=2"
        )
    try:
        return name.strip(), json.loads(value)
    except ValueError:  # a word
        return name.strip(), value.strip()
