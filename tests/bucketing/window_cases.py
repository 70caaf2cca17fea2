"""Gradients of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dynaxla.custom_ops.max_pool_gradient import MAX_POOL2D_GRADIENT, MAX_POOL3D_GRADIENT
from tests.bucketing.plain_cases import floats, lengths
from tests.bucketing.poison import Case, case

aten = torch.ops.aten
HALF = torch.bfloat16
Function = Callable[..., Any]


def _convolution(wanted: tuple[bool, bool, bool] = (True, True, True), **settings: Any) -> Function:
    """Gradients of a convolution with windows of 3, or of a transposed one."""

    def gradients(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor | None = None) -> Any:
        stride, padding = settings.get("stride", 1), settings.get("padding", 1)
        dilation, transposed = settings.get("dilation", 1), settings.get("transposed", False)
        groups, space = settings.get("groups", 1), x.dim() - 2
        given = [[stride] * space, [padding] * space, [dilation] * space, transposed, [0] * space, groups]
        if transposed:
            g = torch.stack([x[:, :2], x[:, 1:]], -1).flatten(2)[..., :-1]
        else:
            g = aten.convolution(x, w, None, *given) + (x[:, :1, ::stride] if g is None else g)
        results = aten.convolution_backward(g, x, w, [g.shape[1]], *given, list(wanted))
        return [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]

    return gradients


WEIGHT = floats(2, 3, 3, 3)
SHORT = (7, 9, 12, 17)
CONVOLUTIONS = [
    case(
        "convolution_backward",
        "convolution_backward_batch",
        _convolution(),
        floats(None, 3, 4, 3),
        WEIGHT,
        floats(None, 2, 4, 3),
        sizes=(5, 7, 9, 12, 17),
    ),
    case(
        "convolution_backward",
        "convolution_backward_image",
        _convolution(),
        lengths("2", "3", "s", "s+1"),
        WEIGHT,
        lengths("2", "2", "s", "s+1"),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_half",
        _convolution(),
        lengths("2", "3", "s", "4", dtype=HALF),
        floats(2, 3, 3, 3, dtype=HALF),
        lengths("2", "2", "s", "4", dtype=HALF),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_strides",
        _convolution(stride=2, padding=2, dilation=2),
        lengths("2", "3", "s"),
        floats(2, 3, 3),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_groups",
        _convolution(groups=3, padding=0),
        lengths("2", "3", "s"),
        floats(3, 1, 3),
        lengths("2", "3", "s-2"),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_transposed",
        _convolution(transposed=True, stride=2),
        lengths("2", "3", "s"),
        floats(3, 2, 3),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_image_only",
        _convolution((True, False, False)),
        lengths("2", "3", "s"),
        floats(2, 3, 3),
        lengths("2", "2", "s"),
        sizes=SHORT,
    ),
    case(
        "convolution_backward",
        "convolution_backward_weight_only",
        _convolution((False, True, False)),
        lengths("s", "3", "4"),
        floats(2, 3, 3),
        lengths("s", "2", "4"),
        sizes=(5, 7, 9, 12, 17),
    ),
]


def _inner(x: torch.Tensor) -> torch.Tensor:
    """As many elements of an image as windows of 3 at every second one of them have."""
    return x[:, :, :-1, :-1][:, :, 1::2, 1::2]


def _max_pool(stride: int = 2, padding: int = 0) -> Function:
    """Gradients, and the places that they go to."""

    def gradients(x: torch.Tensor) -> Any:
        space = x.dim() - 2
        settings = [[3] * space, [stride] * space, [padding] * space, [1] * space, False]
        forward, backward = {
            2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
            3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
        }[space]
        y, found = forward(x, *settings)
        g = y + (_inner(x) if stride == 2 else x)
        return backward(g, x, *settings, found), found

    return gradients


def _max_pool_gradient(stride: int = 2, padding: int = 0, ceil_mode: bool = False) -> Function:
    def gradient(x: torch.Tensor) -> Any:
        space = x.dim() - 2
        settings = [[3] * space, [stride] * space, [padding] * space, [1] * space, ceil_mode]
        forward, backward = {
            2: (aten.max_pool2d_with_indices, MAX_POOL2D_GRADIENT),
            3: (aten.max_pool3d_with_indices, MAX_POOL3D_GRADIENT),
        }[space]
        y = forward(x, *settings)[0]
        return backward(y.sin(), x, *settings)

    return gradient


def _avg_pool(counted: bool = True, padding: int = 1, divisor: int | None = None) -> Function:
    return lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [2, 2], [padding] * 2, False, counted, divisor)


WHOLE = lengths("2", "3", "s", "s-1")
POOLS = [
    case("max_pool_backward", "max_pool_backward", _max_pool(), WHOLE, sizes=(9, 12, 17)),
    case(
        "max_pool_backward",
        "max_pool_backward_edge",
        _max_pool(1, 1),
        lengths("s", "2", "s+1", "4"),
        sizes=(9, 12, 14),
    ),
    case(
        "max_pool_backward",
        "max_pool_backward_batch",
        _max_pool(1, 1),
        floats(None, 3, 4, 4),
    ),
    case(
        "max_pool_backward",
        "max_pool3d_backward",
        _max_pool(1, 1),
        lengths("2", "2", "s", "s+1", "4"),
        sizes=(5, 7),
    ),
    case("max_pool_gradient", "max_pool_gradient", _max_pool_gradient(), WHOLE, sizes=(9, 12, 17)),
    case(
        "max_pool_gradient",
        "max_pool_gradient_edge",
        _max_pool_gradient(1, 1),
        lengths("s", "2", "s+1", "4"),
        sizes=(9, 12, 14),
    ),
    case("max_pool_gradient", "max_pool_gradient_batch", _max_pool_gradient(1, 1), floats(None, 3, 4, 4)),
    case(
        "max_pool_gradient",
        "max_pool_gradient_ceil",
        _max_pool_gradient(2, 1, ceil_mode=True),
        lengths("2", "3", "s", "s-1"),
        sizes=(8, 9, 12, 17),
    ),
    case(
        "max_pool_gradient",
        "max_pool3d_gradient",
        _max_pool_gradient(1, 1),
        lengths("2", "2", "s", "s+1", "4"),
        sizes=(5, 7),
    ),
    case(
        "avg_pool_backward",
        "avg_pool_backward",
        _avg_pool(),
        lengths("2", "3", "(s+1)//2", "s//2"),
        WHOLE,
        sizes=(9, 12, 17),
    ),
    case(
        "avg_pool_backward",
        "avg_pool_backward_uncounted",
        _avg_pool(False),
        lengths("2", "3", "(s+1)//2", "s//2"),
        WHOLE,
        sizes=(9, 12, 17),
    ),
    case(
        "avg_pool_backward",
        "avg_pool_backward_divisor",
        lambda x: _avg_pool(padding=0, divisor=5)(F.avg_pool2d(x, 3, 2) + _inner(x), x),
        WHOLE,
        sizes=(9, 12, 17),
    ),
    case(
        "avg_pool_backward", "avg_pool_backward_batch", _avg_pool(False), floats(None, 3, 2, 2), floats(None, 3, 4, 4)
    ),
    case(
        "adaptive_pool_backward",
        "adaptive_avg_pool_backward",
        lambda g, x: aten._adaptive_avg_pool2d_backward(g, x).sum(1),
        floats(None, 3, 2, 3),
        floats(None, 3, 4, 4),
    ),
    case(
        "upsample_backward",
        "upsample_backward",
        lambda g: aten.upsample_nearest2d_backward(g, [4, 4], [g.shape[0], 3, 2, 2]),
        floats(None, 3, 4, 4),
    ),
    case(
        "edge_pad_backward",
        "reflection_backward",
        lambda g, x: aten.reflection_pad1d_backward(g, x, [1, 0]),
        floats(None, 2, 4),
        floats(None, 2, 3),
    ),
]


def _ceiling(*windows: list[int], pool: Any = aten.max_pool2d_with_indices) -> Function:
    """The gradient of max pooling with ceil_mode, and the places that it goes to: kernel, stride, padding, dilation."""

    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        highest, places = pool(x, *windows, True)
        backward = aten.max_pool3d_with_indices_backward if x.dim() == 5 else aten.max_pool2d_with_indices_backward
        return backward(highest, x, *windows, True, places), places

    return gradient


def _mean_ceiling(*settings: Any) -> Function:
    """The gradient of average pooling with ceil_mode: windows before it, then whether padding counts, and the divisor."""
    windows, (counted, divisor) = settings[:3], settings[3:]
    pool, backward = aten.avg_pool2d, aten.avg_pool2d_backward
    return lambda x: backward(pool(x, *windows, True, counted, divisor), x, *windows, True, counted, divisor)


IMAGE = lengths("2", "3", "s", "s+1")
CEILINGS = [
    case("max_pool", "max_pool_ceil", lambda x: aten.max_pool2d_with_indices(x, [3], [2], [1], [1], True), IMAGE, sizes=SHORT),
    case("max_pool", "max_pool_ceil_dilated", lambda x: aten.max_pool2d_with_indices(x, [3], [2], [1], [2], True), IMAGE,
         sizes=SHORT),
    case("max_pool", "max_pool_ceil_3d", lambda x: aten.max_pool3d_with_indices(x, [2], [2], [0], [1], True),
         lengths("2", "3", "s", "4", "5"), sizes=SHORT),
    case("max_pool_backward", "max_pool_ceil_backward", _ceiling([3], [2], [1], [1]), IMAGE, sizes=SHORT),
    case("max_pool_backward", "max_pool_ceil_backward_twos", _ceiling([2], [2], [0], [1]), IMAGE, sizes=SHORT),
    case("max_pool_backward", "max_pool_ceil_backward_3d",
         _ceiling([2], [2], [0], [1], pool=aten.max_pool3d_with_indices), lengths("2", "3", "s", "4", "5"), sizes=SHORT),
    *[
        case("avg_pool", f"avg_pool_ceil_{name}", lambda x, given=given: aten.avg_pool2d(x, *given[:3], True, *given[3:]),
             IMAGE, sizes=SHORT)
        for name, given in {
            "padded": ([3], [2], [1], True, None), "real": ([3], [2], [1], False, None), "by": ([2], [2], [0], True, 5),
        }.items()
    ],
    case("avg_pool", "avg_pool_ceil_half", lambda x: aten.avg_pool2d(x, [3], [2], [1], True),
         lengths("2", "3", "s", "s+1", dtype=HALF), sizes=SHORT),
    case("avg_pool", "avg_pool_ceil_line", lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), floats(2, 3, None),
         sizes=SHORT),
    case("avg_pool_backward", "avg_pool_ceil_backward", _mean_ceiling([3], [2], [1], True, None), IMAGE, sizes=SHORT),
    case("avg_pool_backward", "avg_pool_ceil_backward_real", _mean_ceiling([3], [2], [1], False, None), IMAGE, sizes=SHORT),
    case("avg_pool_backward", "avg_pool_ceil_backward_by", _mean_ceiling([2], [2], [0], True, 5), IMAGE, sizes=SHORT),
]  # fmt: skip


def _grids(mode: int, padding_mode: int, align_corners: bool) -> list[Case]:
    """Sampling at positions, some of them outside, and its gradients."""
    how = (mode, padding_mode, align_corners)
    name = "_".join(map(str, how))
    image, grid, grad = lengths("2", "3", "s", "s+1"), floats(2, None, 3, 2), floats(2, 3, None, 3)
    return [
        case("sample", f"sample_{name}", lambda x, g: aten.grid_sampler_2d(x, g * 0.8, *how), image, grid, sizes=(9, 12)),
        case("sample_backward", f"sample_backward_{name}",
             lambda d, x, g: aten.grid_sampler_2d_backward(d, x, g * 0.8, *how, [True, True]), grad, image, grid,
             sizes=(9, 12)),
    ]  # fmt: skip


GRIDS = [
    *_grids(0, 0, False),
    *_grids(0, 1, True),
    *_grids(0, 2, True),
    *_grids(1, 2, False),
    *_grids(2, 1, False),
    case("sample", "sample_batch", lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), floats(None, 3, 4, 4),
         floats(None, 4, 3, 2)),
    case("sample_backward", "sample_backward_batch",
         lambda d, x, g: aten.grid_sampler_2d_backward(d, x, g, 0, 0, False, [False, True])[1], floats(None, 3, 4, 3),
         floats(None, 3, 4, 4), floats(None, 4, 3, 2)),
    case("sample", "sample_volume", lambda x, g: aten.grid_sampler_3d(x, g, 0, 0, False), lengths("2", "3", "s", "3", "4"),
         floats(2, 3, 3, 4, 3), sizes=(9, 12)),
]  # fmt: skip
CASES: list[Case] = [*CONVOLUTIONS, *POOLS, *CEILINGS, *GRIDS]
