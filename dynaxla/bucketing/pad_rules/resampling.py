"""Rules of interpolation from and to symbolic sizes: source positions are computed from the true sizes.

The arithmetic is that of torch's CPU kernels, as in ops/resampling_weights.py, which makes tables for fixed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.node import Argument

from dynaxla.bucketing.argument_roles import CONSTANT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, move_to_front
from dynaxla.bucketing.pad_rules.reductions import accumulation_dtype
from dynaxla.bucketing.pad_rules.windows import image_dims, is_per_image, pooled_dims
from dynaxla.bucketing.padded_graph_builder import Op, PaddedGraphBuilder
from dynaxla.bucketing.padded_value import PaddedValue, Unpaddable, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_varying

aten = torch.ops.aten
SMALL_IMAGE = 128
"""Up to this sum of output height and width, torch uses one kernel with its own formula for all layouts."""
_CUBIC = -0.75  # torch's coefficient


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of an image, with the map from output positions to source positions.

    Attributes:
        build: emits nodes.
        size, out: true sizes of input and output, as 0-d tensors.
        count: the padded output size.
        factor: the call's scale factor, or None.
        dtype: the dtype that positions are computed in.
        align_corners: as in `torch.nn.functional.interpolate`.
        sides: the sum of the output's height and width if it is 2-d; else None.
    """

    build: PaddedGraphBuilder
    size: Node
    out: Node
    count: int
    factor: float | None
    dtype: torch.dtype
    align_corners: bool
    sides: Node | None

    def emit(self, target: Op, *args: Argument, **kwargs: Argument) -> Node:
        return self.build.emit(target, *args, **kwargs)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        return self.emit(aten._to_copy.default, node, dtype=dtype)

    @property
    def last(self) -> Node:
        """The last real position."""
        return self.emit(aten.sub.Tensor, self.size, 1)

    @property
    def places(self) -> Node:
        """The output positions 0, 1, ..., int64."""
        return self.emit(aten.arange.default, self.count, dtype=torch.int64, device=self.build.device)

    def scale(self) -> Node:
        """The distance of source positions of neighbouring outputs."""
        if self.align_corners:
            sizes = [self.cast(self.emit(aten.sub.Tensor, n, 1), self.dtype) for n in (self.size, self.out)]
            # A single output reads the first element.
            quotient = self.emit(aten.div.Tensor, *sizes)
            return self.emit(aten.masked_fill.Scalar, quotient, self.emit(aten.le.Scalar, self.out, 1), 0.0)
        if self.factor is not None and self.factor > 0:
            return self.emit(aten.full.default, [], 1.0 / self.factor, dtype=self.dtype, device=self.build.device)
        return self.emit(aten.div.Tensor, self.cast(self.size, self.dtype), self.cast(self.out, self.dtype))

    def centers(self) -> Node:
        """The source position of each output, not yet clamped to the input."""
        if self.align_corners:
            return self.emit(aten.mul.Tensor, self.scale(), self.cast(self.places, self.dtype))
        # In float64, as torch's kernels use fused multiply-add.
        halves = self.emit(aten.add.Scalar, self.cast(self.places, self.dtype), 0.5)
        wide = [self.cast(n, torch.float64) for n in (self.scale(), halves)]
        moved = self.emit(aten.sub.Scalar, self.emit(aten.mul.Tensor, *wide), 0.5)
        return self.cast(moved, self.dtype)

    def floor(self, positions: Node) -> Node:
        """The element at or before each position, computed in float32 for every dtype, as in torch."""
        whole = self.cast(self.emit(aten.floor.default, self.cast(positions, torch.float32)), torch.int64)
        return self.emit(aten.minimum.default, whole, self.last)

    def split(self, positions: Node) -> tuple[Node, Node]:
        """The element at or before each position, and the fraction after it, from 0 to 1."""
        index = self.floor(positions)
        rest = self.emit(aten.sub.Tensor, positions, self.cast(index, self.dtype))
        return index, self.emit(aten.clamp.default, rest, 0.0, 1.0)

    def chosen(self, small: Node, large: Node) -> Node:
        """`small` or `large` by the size of the output; 1-d and 3-d outputs always take `large`."""
        if self.sides is None:
            return large
        return self.emit(aten.where.self, self.emit(aten.le.Scalar, self.sides, SMALL_IMAGE), small, large)


_Taps = Sequence[tuple[Node, Node | None]]
"""For each tap the source positions and their weights (None: 1)."""


@takes(
    output_size=TRUE_SIZE,
    scales=CONSTANT,
    scales_d=CONSTANT,
    scales_h=CONSTANT,
    scales_w=CONSTANT,
)
def upsample(call: RuleContext) -> PaddedValue:
    """Source positions are computed from the true sizes, axis by axis, so that no padding is read."""
    value: PaddedValue = call["self"]
    image, dtype = image_dims(call, value), value.meta.dtype
    if is_per_image(call, value, image):
        return call.result(call.same(), pooled_dims(call, value, image))
    make = sampled_positions(call)
    if dtype.is_floating_point:
        wide = PaddedValue(_cast(call, value.node, accumulation_dtype(dtype)), value.dims)
    elif "nearest" in call.op_name:
        wide = value
    else:
        raise Unpaddable("it resizes integers to a size that varies")
    for place in reversed(image):
        wide = _resample_axis(call, move_to_front(call, wide, place), place, make)
    return call.result(_cast(call, wide.node, dtype), wide.dims)


def sampled_positions(call: RuleContext) -> Callable[[Axis], _Taps]:
    """Returns the function that makes the taps of the call's op."""
    name = call.op_name
    if "nearest" in name:
        return _nearest_exact if "exact" in name else _nearest
    return _cubic if "bicubic" in name else _linear


def _resample_axis(call: RuleContext, value: PaddedValue, place: int, make: Callable[[Axis], _Taps]) -> PaddedValue:
    build, sizes = call.build, call.true_sizes
    dtype = value.meta.dtype if value.meta.dtype.is_floating_point else torch.float32
    dim = (build.factor(sizes[place]),)
    axis = Axis(
        build,
        build.scalar(single_factor(value.dims[place]).size),
        build.scalar(sizes[place]),
        padded_size(dim),
        scale_factor(call, len(value.dims), place),
        dtype,
        bool(call.get("align_corners", False)),
        build.emit(aten.add.Tensor, *map(build.scalar, sizes[2:])) if len(sizes) == 4 else None,
    )
    total: Node | None = None
    for positions, weights in make(axis):
        inside = build.emit(aten.clamp.default, positions, 0, padded_size(value.dims[place]) - 1)
        node = build.emit(aten.index_select.default, value.node, place, inside)
        if weights is not None:
            node = build.emit(aten.mul.Tensor, node, broadcast_along(call, weights, len(value.dims), place))
        total = node if total is None else build.emit(aten.add.Tensor, total, node)
    assert total is not None
    return PaddedValue(total, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def scale_factor(call: RuleContext, rank: int, place: int) -> float | None:
    """The call's scale factor of an axis, or None."""
    names = {3: ("scales",), 4: ("scales_h", "scales_w"), 5: ("scales_d", "scales_h", "scales_w")}
    factor = call.get(names[rank][place - 2])
    if is_varying(factor):
        raise Unpaddable("its scale is a size")
    return None if factor is None else float(factor)


def _nearest(axis: Axis) -> _Taps:
    """The element at or before each position; small images have special cases for equal and doubled sizes."""
    large = axis.floor(axis.emit(aten.mul.Tensor, axis.scale(), axis.cast(axis.places, axis.dtype)))
    single = replace(axis, dtype=torch.float32)
    small = axis.floor(axis.emit(aten.mul.Tensor, axis.cast(axis.places, torch.float32), single.scale()))
    twice = axis.emit(aten.eq.Tensor, axis.out, axis.emit(aten.mul.Tensor, axis.size, 2))
    halves = axis.emit(aten.div.Tensor_mode, axis.places, 2, rounding_mode="floor")
    small = axis.emit(aten.where.self, twice, halves, small)
    small = axis.emit(aten.where.self, axis.emit(aten.eq.Tensor, axis.out, axis.size), axis.places, small)
    return [(axis.chosen(small, large), None)]


def _nearest_exact(axis: Axis) -> _Taps:
    """The element with the nearest center."""
    large = axis.floor(axis.emit(aten.add.Scalar, axis.cast(axis.centers(), torch.float64), 0.5))
    scale = axis.cast(replace(axis, dtype=torch.float32).scale(), torch.float64)
    middles = axis.emit(aten.add.Scalar, axis.cast(axis.places, torch.float64), 0.5)
    return [(axis.chosen(axis.floor(axis.emit(aten.mul.Tensor, middles, scale)), large), None)]


def _linear(axis: Axis) -> _Taps:
    """The two elements around each position; the element itself if the size does not change."""
    positions = axis.centers()
    if not axis.align_corners:
        positions = axis.emit(aten.clamp.default, positions, 0.0)
    index, rest = axis.split(positions)
    behind = axis.emit(aten.minimum.default, axis.emit(aten.add.Scalar, index, 1), axis.last)
    behind = axis.emit(aten.where.self, axis.emit(aten.eq.Tensor, axis.out, axis.size), index, behind)
    return [(index, axis.emit(aten.rsub.Scalar, rest, 1)), (behind, rest)]


def _cubic(axis: Axis) -> _Taps:
    """The four elements around each position; the edge is repeated outside of the input."""
    index, rest = axis.split(axis.centers())
    back = axis.emit(aten.rsub.Scalar, rest, 1)
    outer = [axis.emit(aten.add.Scalar, x, 1) for x in (rest, back)]
    weights = (
        cubic_far(axis, outer[0], _CUBIC),
        cubic_near(axis, rest, _CUBIC),
        cubic_near(axis, back, _CUBIC),
        cubic_far(axis, outer[1], _CUBIC),
    )
    moved = [axis.emit(aten.add.Scalar, index, step) for step in (-1, 0, 1, 2)]
    inside = [axis.emit(aten.minimum.default, axis.emit(aten.clamp.default, m, 0), axis.last) for m in moved]
    return list(zip(inside, weights, strict=True))


def cubic_near(axis: Axis, x: Node, a: float) -> Node:
    """The weight of an element at a distance from 0 to 1: ((a + 2) x - (a + 3)) x x + 1."""
    inner = axis.emit(aten.sub.Scalar, axis.emit(aten.mul.Scalar, x, a + 2), a + 3)
    product = axis.emit(aten.mul.Tensor, axis.emit(aten.mul.Tensor, inner, x), x)
    return axis.emit(aten.add.Scalar, product, 1)


def cubic_far(axis: Axis, x: Node, a: float) -> Node:
    """The weight of an element at a distance from 1 to 2: ((a x - 5 a) x + 8 a) x - 4 a."""
    inner = axis.emit(aten.sub.Scalar, axis.emit(aten.mul.Scalar, x, a), 5 * a)
    inner = axis.emit(aten.add.Scalar, axis.emit(aten.mul.Tensor, inner, x), 8 * a)
    return axis.emit(aten.sub.Scalar, axis.emit(aten.mul.Tensor, inner, x), 4 * a)


def _cast(call: RuleContext, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else call.build.emit(aten._to_copy.default, node, dtype=dtype)
