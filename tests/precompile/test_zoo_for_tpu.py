"""Forty architectures of the zoo, padded to a bucket, by the TPU's own compiler.

The quick list has one, --full a third, `-m slow` all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.precompile.declared_dims import named_arguments
from tests.precompile.test_compile_for_target import TARGET, needs_libtpu
from tests.zoo.architecture import Built
from tests.zoo.registry import find

QUICK = ("ranker",)
LONG = (
    "mlp", "temporal-convolution", "fourier-mixer", "recommender", "distilbert", "electra", "modernbert", "gpt2", "llama",
    "convnext", "wav2vec2", "dit",
)  # fmt: skip
SLOW = (
    "transformer-encoder", "fnet", "bert", "roberta", "albert", "mpnet", "deberta-v2", "qwen2", "qwen3", "opt", "gpt-neox",
    "gemma", "phi", "bloom", "t5", "mixtral", "mamba", "vit", "deit", "dinov2", "swin", "mobilenet-v2", "resnet", "whisper",
    "audio-spectrogram-transformer", "clip", "siglip",
)  # fmt: skip
FAMILIES_BY_LENGTH = ("text",)


def _cases() -> Iterator[Any]:
    for names, marks in ((QUICK, ()), (LONG, (pytest.mark.long,)), (SLOW, (pytest.mark.slow,))):
        for name in names:
            yield pytest.param(name, marks=marks, id=name)


def varying(built: Built, dim: int) -> str:
    """Declares a dim of the first tensor, and of all that have the same size there, and a bucket above that."""
    model, args, kwargs = built
    named = named_arguments(model, args, kwargs)
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and not name.isdecimal()}
    first = next(iter(tensors.values()))
    alike = [name for name, value in tensors.items() if value.shape[: dim + 1] == first.shape[: dim + 1]]
    return ",".join(f"{name}:{dim}" for name in alike) + f"={1 << first.shape[dim].bit_length()}"


@needs_libtpu
@pytest.mark.parametrize("name", _cases())
def test_a_bucket_compiles_for_a_tpu(name: str) -> None:
    architecture = find(name)
    built = architecture.build(torch.float32)
    reports = dynaxla.compile_for_target(
        *built,
        target=TARGET,
        buckets=[varying(built, 1 if architecture.family in FAMILIES_BY_LENGTH else 0)],
        options={"bucketing": "require", "fallback": "error"},
    )
    programs = [report for report in reports if report.kind == "program"]
    assert len(programs) == architecture.graphs
    assert all(report.padded for report in programs)
    assert all(report.fits and report.memory.total_bytes > 0 for report in reports)


def test_there_are_forty() -> None:
    names = (*QUICK, *LONG, *SLOW)
    assert len(set(names)) == len(names) == 40
    assert len(QUICK) + len(LONG) >= 40 // 3


def minilm() -> Built:
    """A layer of all-MiniLM-L6-v2's widths."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=1, num_attention_heads=12, intermediate_size=1536, vocab_size=1000
    )
    tokens = torch.randint(0, 1000, (2, 13))
    return BertModel(config).eval(), (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@needs_libtpu
@pytest.mark.parametrize(
    ("generation", "longest"),
    [
        pytest.param("v6e", 16, marks=pytest.mark.long),
        pytest.param("v5e", 256, marks=pytest.mark.slow),
        pytest.param("v6e", 256, marks=pytest.mark.slow),
    ],
)
def test_every_length_of_minilm_has_a_program(generation: str, longest: int) -> None:
    reports = dynaxla.compile_for_target(
        *minilm(),
        target=f"tpu:{generation}:1x1",
        buckets=[f"input_ids:1,attention_mask:1=8..{longest}"],
        options={"bucketing": "require", "fallback": "error"},
    )
    lengths = [length for length in (256, 192, 128, 96, 64, 48, 32, 16, 8) if length <= longest]
    assert [report.sizes for report in reports if report.kind == "program"] == [
        {"input_ids:1": length} for length in lengths
    ]
    assert all(report.chip is not None and report.chip.name == generation for report in reports)
    flops = [report.flops for report in reports if report.kind == "program"]
    assert flops == sorted(flops, reverse=True)
