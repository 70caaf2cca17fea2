"""Keeps torch's resizing ops undecomposed while AOTAutograd traces.

torch registers Python kernels that decompose them before it consults a decomposition table, and that choose other
elements than eager's kernels (nearest with a scale of 2.3 on a 3x3 image: 20 of 36 differ). The op table has bodies
with eager's arithmetic, so the ops must reach it undecomposed. So must their backwards, most of which have fake kernels
without support for symbolic sizes: torch, which decomposes the forwards, never calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.types import IntLikeType

from dynaxla.torch_api.decompositions import compute_output_size, suggest_memory_format
from dynaxla.torch_api.overloads import HigherOrderOperator, OpOverload
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, FAKE, Kernel, python_kernels, replace_python_kernels

aten = torch.ops.aten

Size = Sequence[IntLikeType]

_KEYS = (COMPOSITE, AUTOGRAD)
_PACKETS = (
    aten._upsample_bicubic2d_aa,
    aten._upsample_bilinear2d_aa,
    aten._upsample_lanczos2d_aa,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_bicubic2d,
    aten.upsample_bilinear2d,
    aten.upsample_linear1d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten.upsample_trilinear3d,
)
_KEEP_LAYOUT = (aten.upsample_bilinear2d, aten.upsample_trilinear3d)
"""Ops with fake backward kernels defined here whose gradients are channels last if their incoming gradients are."""


def keep_resizes_whole() -> AbstractContextManager[None]:
    """Context in which `op.vec` becomes `op.default` with the computed size, and `op.default` and its backward stay.

    torch's kernels are restored at the end.
    """
    changes: dict[OpOverload | HigherOrderOperator, Mapping[Any, Kernel | None]] = {}
    for packet in _PACKETS:
        backward = getattr(aten, f"{packet.__name__}_backward").default
        fake = _gradient_like_operand if packet in _KEEP_LAYOUT else _gradient
        changes[packet.vec] = dict.fromkeys(_KEYS, _with_size(packet.default))
        changes[packet.default] = dict.fromkeys(_KEYS)
        changes[backward] = {**dict.fromkeys(_KEYS), FAKE: python_kernels(backward).get(FAKE, fake)}
    return replace_python_kernels(changes)


def _with_size(resize: OpOverload) -> Callable[..., Tensor]:
    def resize_by_size_or_scale(input: Tensor, output_size: Size | None, *rest: Any) -> Tensor:
        *settings, scale_factors = rest
        size = compute_output_size(input.size(), output_size, scale_factors)
        scales = scale_factors if scale_factors else [None] * len(size)
        resized: Tensor = resize(input, size, *settings, *scales)
        return resized

    return resize_by_size_or_scale


def _gradient(grad: Tensor, output_size: Size, input_size: Size, *settings: object, **scales: float | None) -> Tensor:
    return grad.new_empty(input_size)


def _gradient_like_operand(
    grad: Tensor, output_size: Size, input_size: Size, *settings: object, **scales: float | None
) -> Tensor:
    return grad.new_empty(input_size).to(memory_format=suggest_memory_format(grad))
