"""Keeps torch's resizing ops undecomposed while AOTAutograd traces, and pools whole images without writing strides.

torch registers Python kernels that decompose them before it consults a decomposition table, and that choose other
elements than eager's kernels (nearest with a scale of 2.3 on a 3x3 image: 20 of 36 differ). The op table has bodies
with eager's arithmetic, so the ops must reach it undecomposed. So must their backwards, most of which have fake kernels
without support for symbolic sizes: torch, which decomposes the forwards, never calls them.

A pool to one pixel is a mean to torch, which then sets the mean's strides in place where the image has channels last.
The gradient of that writes through a view whose strides vary with the image's sizes, for which there is no program.
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
from dynaxla.torch_api.python_kernels import (
    AUTOGRAD,
    COMPOSITE,
    FAKE,
    Kernel,
    make_composite_kernel,
    python_kernels,
    replace_python_kernels,
)
from dynaxla.torch_api.symbols import varies

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


def pool_images_by_mean() -> AbstractContextManager[None]:
    """Context in which a pool to one pixel of an image whose sizes vary is a mean. torch's kernels return at the end."""
    pools = (aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
    return replace_python_kernels({op: dict.fromkeys(_KEYS, _pool_by_mean(op)) for op in pools})


def _pool_by_mean(op: OpOverload) -> Callable[[Tensor, Size], Tensor]:
    pool_by_torch = make_composite_kernel(op)

    def pool(x: Tensor, output_size: Size) -> Tensor:
        if not varies(x) or x.layout is not torch.strided or any(not isinstance(n, int) or n != 1 for n in output_size):
            return pool_by_torch(x, output_size)  # type: ignore[no-any-return]
        places = tuple(range(-len(output_size), 0))
        mean = x.mean(places, keepdim=True)
        if suggest_memory_format(x) is torch.contiguous_format:
            return mean
        return mean.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)

    return pool


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
