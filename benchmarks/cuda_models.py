"""Models on a GPU for `python -m dynaxla bench benchmarks/cuda_models.py:NAME`, at sizes that fill one: torch's CUDA tensors.

python -m dynaxla bench benchmarks/cuda_models.py:bert benchmarks/cuda_models.py:resnet50_bfloat16 --no-starts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

Case = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]


def _text(model: str, config: str, dtype: torch.dtype, batch: int, tokens: int, **settings: Any) -> Case:
    torch.manual_seed(0)
    net = getattr(transformers, model)(getattr(transformers, config)(**settings)).to("cuda", dtype).eval()
    return net, (torch.randint(0, 1000, (batch, tokens), device="cuda"),), {}


def _image(model: str, config: str, dtype: torch.dtype, batch: int, **settings: Any) -> Case:
    torch.manual_seed(0)
    net = getattr(transformers, model)(getattr(transformers, config)(**settings)).to("cuda", dtype).eval()
    return net, (torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype),), {}


def bert(dtype: torch.dtype = torch.float32) -> Case:
    return _text("BertModel", "BertConfig", dtype, 32, 128)


def bert_bfloat16() -> Case:
    return bert(torch.bfloat16)


def gpt2(dtype: torch.dtype = torch.float32) -> Case:
    return _text("GPT2LMHeadModel", "GPT2Config", dtype, 8, 512, use_cache=False)


def gpt2_bfloat16() -> Case:
    return gpt2(torch.bfloat16)


def resnet50(dtype: torch.dtype = torch.float32) -> Case:
    return _image("ResNetForImageClassification", "ResNetConfig", dtype, 32)


def resnet50_bfloat16() -> Case:
    return resnet50(torch.bfloat16)


def one_token() -> Case:
    """A Llama-like of 100 M parameters, one token for one user: all overhead."""
    settings = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return _text("LlamaModel", "LlamaConfig", torch.bfloat16, 1, 1, use_cache=False, **settings)
