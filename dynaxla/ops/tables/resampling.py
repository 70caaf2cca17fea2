"""Rows of the ops that pad, resize and sample images; their bodies are in lowering/jax_rules."""

from __future__ import annotations

import torch

from dynaxla.ops import internal
from dynaxla.ops.spec import OpSpec, Support
from dynaxla.ops.tables.data import _rows, argument, tensor_of

aten = torch.ops.aten

SMALL_IMAGE = 128  # up to this sum of output height and width torch takes one kernel for every layout


def check_nearest_layout(node: torch.fx.Node) -> str | None:
    """Refuse a channels-last image for which torch's two kernels choose elements by different formulas."""
    x, output_size = tensor_of(node, "self"), argument(node, "output_size")
    if x.ndim == 3 or x.is_contiguous() or x.shape[1] <= 3:
        return None
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    if not x.is_contiguous(memory_format=layout):
        return None
    varies = not all(isinstance(size, int) for size in output_size)
    if _chooses_alike(node, x) if varies else x.ndim == 4 and sum(output_size) <= SMALL_IMAGE:
        return None
    return "a channels-last image, whose elements torch chooses by another formula"


def _chooses_alike(node: torch.fx.Node, x: torch.Tensor) -> bool:
    """Whether both formulas give the same at all sizes: not in float64, or if a factor may give equal sizes."""
    if "exact" in str(node.target) or x.dtype == torch.float64:
        return False
    names = {4: ("scales_h", "scales_w"), 5: ("scales_d", "scales_h", "scales_w")}[x.ndim]
    return all(argument(node, name) in (None, 1.0, 2.0) for name in names)


def check_width(node: torch.fx.Node) -> str | None:
    """Refuse a result one element wide where torch's CPU kernel gives every row the first row's elements."""
    height, width = argument(node, "output_size")
    by_rows = node.target not in PLAIN or tensor_of(node, "self").dtype == torch.uint8
    wrong = by_rows and width == 1 < height
    return "torch's own kernel repeats the first row of a result one element wide" if wrong else None


PLAIN = (aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
ONE_WIDE = "no result one element wide where torch's CPU kernel is wrong"

ANTIALIASED = frozenset({torch.float32, torch.float64, torch.uint8})

RESAMPLING = (
    *_rows(
        aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
        aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
        aten._upsample_nearest_exact3d.default,
        check=check_nearest_layout,
        limits="no large channels-last images",
    ),
    *_rows(
        aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
        aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
        aten._upsample_nearest_exact2d_backward.default, aten._upsample_nearest_exact3d_backward.default,
        aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default,
        aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default,
        aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default,
        aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default,
        aten._upsample_lanczos2d_aa_backward.default,
    ),
    *_rows(
        aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default,
        check=check_width,
        limits=ONE_WIDE,
    ),
    *(
        OpSpec(target, Support.JAX, check=check_width, dtypes=ANTIALIASED, limits=ONE_WIDE)
        for target in (
            aten._upsample_bilinear2d_aa.default,
            aten._upsample_bicubic2d_aa.default,
            aten._upsample_lanczos2d_aa.default,
        )
    ),
    *_rows(
        aten.grid_sampler_2d.default, aten.grid_sampler_3d.default,
        limits="nearest takes either element halfway between two; no reflection from where floats have no fraction",
    ),
    *_rows(
        aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default,
        aten.im2col.default, aten.col2im.default, internal.SAMPLE_GRID, internal.SAMPLE_GRID_BACKWARD,
    ),
)  # fmt: skip

PADDING = _rows(
    aten.constant_pad_nd.default,
    aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad1d.default, aten.replication_pad1d_backward.default,
    aten.replication_pad2d.default, aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default, aten.replication_pad3d_backward.default,
)  # fmt: skip

ROWS: tuple[OpSpec, ...] = (*RESAMPLING, *PADDING)
