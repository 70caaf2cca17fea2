"""Resizing by interpolation, and the windows of an image as columns.

Along each axis an output is a weighted sum of a few input elements (see `resampling_weights`); axes are resized one by
one, the last first, as in torch. A backward pass applies the transposed tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import antialiasing as antialiasing_rules
from dynaxla.bucketing.pad_rules import image_gradients as image_gradients_rules
from dynaxla.bucketing.pad_rules import resampling as resampling_rules
from dynaxla.bucketing.pad_rules import windows as windows_rules
from dynaxla.bucketing.pad_rules.resampling import SMALL_IMAGE
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.custom_ops.weighted_sums import WEIGHTED_SUMS
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import widen
from dynaxla.ops.dtypes import FLOATS, INEXACT, WIDE_FLOATS
from dynaxla.ops.record import Body, OpFamily
from dynaxla.ops.resampling_weights import (
    Filter,
    Floating,
    Taps,
    antialias_taps,
    apply_taps,
    cubic_filter,
    cubic_taps,
    fixed_point,
    lanczos_filter,
    legacy_nearest_taps,
    linear_taps,
    merge_repeated,
    nearest_taps,
    transpose_taps,
    triangle_filter,
)

aten = torch.ops.aten
OPS = OpFamily()
PLAIN = (aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
ONE_WIDE = "no result one element wide where torch's CPU kernel is wrong"


def check_nearest_layout(node: torch.fx.Node) -> str | None:
    """Refuses a channels-last image for which torch's two kernels choose elements by different formulas."""
    x, output_size = tensor_of(node, "self"), argument(node, "output_size")
    if x.ndim == 3 or x.is_contiguous() or x.shape[1] <= 3:
        return None
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    if not x.is_contiguous(memory_format=layout):
        return None
    varies = not all(isinstance(size, int) for size in output_size)
    if _formulas_agree(node, x) if varies else x.ndim == 4 and sum(output_size) <= SMALL_IMAGE:
        return None
    return "a channels-last image, whose elements torch chooses by another formula"


def _formulas_agree(node: torch.fx.Node, x: torch.Tensor) -> bool:
    """Whether both formulas agree at all sizes: not in float64, or if a factor may give equal sizes."""
    if "exact" in str(node.target) or x.dtype == torch.float64:
        return False
    names = {4: ("scales_h", "scales_w"), 5: ("scales_d", "scales_h", "scales_w")}[x.ndim]
    return all(argument(node, name) in (None, 1.0, 2.0) for name in names)


def check_width(node: torch.fx.Node) -> str | None:
    """Refuses a result one element wide, and higher, if torch's CPU kernel gives every row the first row's elements."""
    height, width = argument(node, "output_size")
    by_rows = node.target not in PLAIN or tensor_of(node, "self").dtype == torch.uint8
    is_higher = not isinstance(height, int) or height > 1  # a size that varies is a node
    wrong = by_rows and isinstance(width, int) and width == 1 and is_higher
    return "torch's own kernel repeats the first row of a result one element wide" if wrong else None


MakeTaps = Callable[[int, int, bool, float | None, Floating], Taps]


@dataclass(frozen=True, slots=True)
class Resize:
    """The arguments of a resizing call."""

    output_size: Sequence[int]
    align_corners: bool
    factors: Sequence[float | None]

    def tables(self, sizes: Sequence[int], make: MakeTaps, kind: Floating) -> list[Taps]:
        """Makes the taps of each axis after batch and channel."""
        each = zip(sizes, self.output_size, self.factors, strict=True)
        return [make(size, out, self.align_corners, factor, kind) for size, out, factor in each]


def position_dtype(x: jax.Array) -> Floating:
    """The float type that torch computes positions and weights in."""
    return np.float64 if x.dtype == jnp.float64 else np.float32


def apply_all(x: jax.Array, tables: Sequence[Taps]) -> jax.Array:
    """Applies one table per axis after batch and channel; 16-bit floats are rounded once, at the end."""
    wide = widen(x)
    for axis in reversed(range(len(tables))):
        wide = apply_taps(wide, axis + 2, tables[axis])
    return wide.astype(x.dtype)


def _nearest(size: int, out: int, _: bool, factor: float | None, kind: Floating, *, exact: bool) -> Taps:
    return nearest_taps(size, out, factor, exact, kind)


def _legacy_nearest(size: int, out: int, _: bool, factor: float | None, kind: Floating, *, exact: bool) -> Taps:
    return legacy_nearest_taps(size, out, factor, exact)


def upsample_nearest(x: jax.Array, resize: Resize, *, exact: bool) -> jax.Array:
    small = len(resize.output_size) == 2 and sum(resize.output_size) <= SMALL_IMAGE
    make = partial(_legacy_nearest if small else _nearest, exact=exact)
    return apply_all(x, resize.tables(x.shape[2:], make, position_dtype(x)))


def upsample(x: jax.Array, resize: Resize, *, make: MakeTaps) -> jax.Array:
    """Linear and cubic resizing; uint8 uses fixed-point weights."""
    if x.dtype == jnp.uint8:
        return resize_changed_axes(x, resize, make=partial(_without_repeats, make=make))
    return apply_all(x, resize.tables(x.shape[2:], make, position_dtype(x)))


def upsample_backward(grad: jax.Array, input_size: Sequence[int], resize: Resize, *, make: MakeTaps) -> jax.Array:
    tables = resize.tables(input_size[2:], make, position_dtype(grad))
    return apply_all(grad, [transpose_taps(table, size) for table, size in zip(tables, input_size[2:], strict=True)])


def resize_changed_axes(x: jax.Array, resize: Resize, *, make: MakeTaps) -> jax.Array:
    """Resamples only axes whose size changes; uint8 is rounded after each."""
    wide = widen(x)
    for axis in reversed(range(2, x.ndim)):
        size, out, factor = x.shape[axis], resize.output_size[axis - 2], resize.factors[axis - 2]
        if size == out:
            continue
        if x.dtype == jnp.uint8:
            table, bits = fixed_point(make(size, out, resize.align_corners, factor, np.float64))
            total = apply_taps(wide.astype(jnp.int32), axis, table) + (1 << (bits - 1))
            wide = jnp.clip(total >> bits, 0, 255).astype(jnp.uint8)
        else:
            wide = apply_taps(wide, axis, make(size, out, resize.align_corners, factor, position_dtype(x)))
    return wide.astype(x.dtype)


def _without_repeats(
    size: int, out: int, align_corners: bool, factor: float | None, kind: Floating, *, make: MakeTaps
) -> Taps:
    return merge_repeated(make(size, out, align_corners, factor, kind), size)


SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
Setting = bool | float | None  # align_corners, or a scale
Forward = Callable[[jax.Array, Resize], jax.Array]
Backward = Callable[[jax.Array, Sequence[int], Resize], jax.Array]


def _make_bodies(rank: int, forward: Forward, backward: Backward, options: tuple[str, ...] = ()) -> tuple[Body, Body]:
    """Makes the forward and backward bodies of one op; all these ops take their arguments in the same order."""

    def resize_of(output_size: Sequence[int], rest: Sequence[Setting], named: dict[str, Setting]) -> Resize:
        given = dict(zip((*options, *SCALES[rank]), rest, strict=False)) | named
        aligned = bool(given.get("align_corners", False))
        return Resize(output_size, aligned, [given.get(scale) for scale in SCALES[rank]])

    def resized(x: jax.Array, output_size: Sequence[int], *rest: Setting, **named: Setting) -> jax.Array:
        return forward(x, resize_of(output_size, rest, named))

    def gradient(
        grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *rest: Setting, **named: Setting
    ) -> jax.Array:
        return backward(grad, input_size, resize_of(output_size, rest, named))

    return resized, gradient


def _interpolating(rank: int, make: MakeTaps) -> tuple[Body, Body]:
    return _make_bodies(rank, partial(upsample, make=make), partial(upsample_backward, make=make), ("align_corners",))


def _antialiasing(filter_: Filter, width: int) -> tuple[Body, Body]:
    make = partial(antialias_taps, filter_=filter_, width=width)
    return _make_bodies(
        2, partial(resize_changed_axes, make=make), partial(upsample_backward, make=make), ("align_corners",)
    )


_IMAGES = FLOATS | {torch.uint8}  # eager has no kernels for other dtypes

for _rank in SCALES:
    for _name, _exact in ((f"upsample_nearest{_rank}d", False), (f"_upsample_nearest_exact{_rank}d", True)):
        _backward = partial(upsample_backward, make=partial(_legacy_nearest, exact=_exact))
        _body, _gradient = _make_bodies(_rank, partial(upsample_nearest, exact=_exact), _backward)
        OPS.op(
            getattr(aten, _name).default,
            dtypes=_IMAGES,
            check=check_nearest_layout,
            pad=resampling_rules.upsample,
            limits="no large channels-last images",
            as_aten=None if _exact else decompose,
        )(_body)
        OPS.op(getattr(aten, _name + "_backward").default, pad=image_gradients_rules.upsample_backward)(_gradient)

for _forward, _backward_of, _pair in (
    (aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default, _interpolating(1, linear_taps)),
    (aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default, _interpolating(3, linear_taps)),
):
    OPS.op(_forward, dtypes=FLOATS, pad=resampling_rules.upsample)(_pair[0])
    OPS.op(_backward_of, pad=image_gradients_rules.upsample_backward)(_pair[1])

for _forward, _backward_of, _pair in (
    (aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default, _interpolating(2, linear_taps)),
    (aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default, _interpolating(2, cubic_taps)),
):
    OPS.op(_forward, dtypes=_IMAGES, check=check_width, pad=resampling_rules.upsample, limits=ONE_WIDE)(_pair[0])
    OPS.op(_backward_of, pad=image_gradients_rules.upsample_backward)(_pair[1])

_ANTIALIASED = WIDE_FLOATS | {torch.uint8}
for _packet, _backward_packet, _pair in (
    (aten._upsample_bilinear2d_aa, aten._upsample_bilinear2d_aa_backward, _antialiasing(triangle_filter, 2)),
    (aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward, _antialiasing(cubic_filter, 4)),
    (aten._upsample_lanczos2d_aa, aten._upsample_lanczos2d_aa_backward, _antialiasing(lanczos_filter, 6)),
):
    OPS.op(_packet.default, dtypes=_ANTIALIASED, check=check_width, pad=antialiasing_rules.antialias, limits=ONE_WIDE)(
        _pair[0]
    )
    OPS.op(_backward_packet.default, pad=antialiasing_rules.antialias_backward)(_pair[1])


@OPS.op(WEIGHTED_SUMS, dtypes=WIDE_FLOATS | {torch.uint8, torch.int32, torch.bool})
def weighted_sums(x: jax.Array, weights: jax.Array, is_read: jax.Array) -> jax.Array:
    """A product, where every element is a number; bytes by numbers of 16 bits are summed exactly, on the CPU in float64."""
    read = jnp.where(is_read, weights, 0)
    if x.dtype == jnp.uint8:
        of_floats = partial(_product_of_rows, dtype=jnp.float64)
        product: jax.Array = lax.platform_dependent(
            x, read, cpu=of_floats, default=partial(_product_of_rows, dtype=jnp.int32)
        )
        return product

    def of_numbers(x: jax.Array) -> jax.Array:
        return jnp.einsum("...n,mn->...m", x, read, precision=lax.Precision.HIGHEST)

    def of_all(x: jax.Array) -> jax.Array:
        return jnp.where(is_read, x[..., None, :] * weights, 0).sum(-1)

    return lax.cond(jnp.isfinite(x).all(), of_numbers, of_all, x)  # type: ignore[no-any-return]


def _product_of_rows(x: jax.Array, weights: jax.Array, *, dtype: type) -> jax.Array:
    return jnp.einsum("...n,mn->...m", x.astype(dtype), weights.astype(dtype)).astype(weights.dtype)


def window_taps(size: int, kernel: int, dilation: int, stride: int) -> Taps:
    """Row k * count + o is the index of element k of window o, on a padded axis."""
    count = (size - dilation * (kernel - 1) - 1) // stride + 1
    places = np.arange(kernel)[:, None] * dilation + np.arange(count) * stride
    return Taps(places.reshape(-1, 1).astype(np.int64))


@OPS.op(aten.im2col.default, dtypes=INEXACT | {torch.bool}, pad=windows_rules.im2col, as_aten=decompose)
def im2col(
    x: jax.Array, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> jax.Array:
    sides = [(0, 0, 0)] * (x.ndim - 2) + [(p, p, 0) for p in padding]
    spread = lax.pad(x, jnp.zeros((), x.dtype), sides)
    for axis in range(2):
        place = x.ndim - 2 + axis
        size = spread.shape[place]
        spread = apply_taps(spread, place, window_taps(size, kernel_size[axis], dilation[axis], stride[axis]))
    rows, columns = (spread.shape[x.ndim - 2 + axis] // kernel_size[axis] for axis in range(2))
    split = spread.reshape(-1, x.shape[-3], kernel_size[0], rows, kernel_size[1], columns).transpose(0, 1, 2, 4, 3, 5)
    return split.reshape(*x.shape[:-3], x.shape[-3] * kernel_size[0] * kernel_size[1], rows * columns)


@OPS.op(aten.col2im.default, dtypes=INEXACT | {torch.bool}, as_aten=decompose)
def col2im(
    x: jax.Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    padded = [size + 2 * p for size, p in zip(output_size, padding, strict=True)]
    tables = [window_taps(padded[a], kernel_size[a], dilation[a], stride[a]) for a in range(2)]
    counts = [len(tables[a].index) // kernel_size[a] for a in range(2)]
    channels = x.shape[-2] // (kernel_size[0] * kernel_size[1])
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else widen(x)
    split = wide.reshape(-1, channels, *kernel_size, *counts).transpose(0, 1, 2, 4, 3, 5)
    image = split.reshape(-1, channels, kernel_size[0] * counts[0], kernel_size[1] * counts[1])
    for axis in range(2):
        image = apply_taps(image, axis + 2, transpose_taps(tables[axis], padded[axis]))
    cropped = image[..., padding[0] : padded[0] - padding[0], padding[1] : padded[1] - padding[1]]
    return cropped.reshape(*x.shape[:-2], channels, *output_size).astype(x.dtype)
