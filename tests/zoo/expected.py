"""Where an architecture may differ from "an executable for each graph, as close to eager as its dtype allows", and why.

Strict: tests/test_zoo.py fails for an entry that is no longer needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Expected:
    """What one architecture does in one dtype.

    reason: why, in a sentence.
    eager_ops: every overload that runs in eager PyTorch.
    executables: how many there are where eager ops cut a graph; None: as many as graphs.
    noisy: the difference from eager is above the dtype's tolerance, because eager's own rounding is: the test then
        compares both with a float32 run of the same weights.
    """

    reason: str = ""
    eager_ops: frozenset[str] = frozenset()
    executables: int | None = None
    noisy: bool = False

    def __post_init__(self) -> None:
        if bool(self.eager_ops or self.noisy) != bool(self.reason):
            raise ValueError(f"a deviation and its reason go together: {self}")


AS_THE_RULE = Expected()


def _both(name: str, expected: Expected) -> dict[tuple[str, torch.dtype], Expected]:
    return {(name, dtype): expected for dtype in (torch.float32, torch.bfloat16)}


def _experts(executables: int) -> Expected:
    return Expected(
        "transformers registers an op of its own for the products of the experts",
        frozenset({"transformers.grouped_mm_fallback.default"}),
        executables,
    )


def _encoder_layer(executables: int) -> Expected:
    return Expected(
        "nn.TransformerEncoderLayer calls one kernel of torch for the whole layer where no gradient is asked for",
        frozenset({"aten._transformer_encoder_layer_fwd.default"}),
        executables,
    )


_CHUNKS = Expected(
    "a strided view of a view, whose storage is not laid out as the view is",
    frozenset({"aten.as_strided.default"}),
    8,
)

EXPECTED: Mapping[tuple[str, torch.dtype], Expected] = MappingProxyType(
    {
        **_both("longformer", _CHUNKS),
        **_both("mixtral", _experts(5)),
        **_both("qwen2-moe", _experts(5)),
        **_both("qwen3-moe", _experts(5)),
        **_both("olmoe", _experts(5)),
        **_both("gpt-oss", _experts(5)),
        **_both("deepseek-v3", _experts(3)),
        **_both("transformer-encoder", _encoder_layer(0)),
        **_both("transformer-seq2seq", _encoder_layer(1)),
    }
)
