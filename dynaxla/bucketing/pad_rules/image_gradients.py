"""Rules of the gradients of edge padding, adaptive pooling and interpolation: inputs get the gradients of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.adaptive_pooling import pooling_windows
from dynaxla.bucketing.pad_rules.alignment import move_elements
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, move_to_front
from dynaxla.bucketing.pad_rules.padding import edge_positions, padding_of_dim
from dynaxla.bucketing.pad_rules.reductions import accumulation_dtype
from dynaxla.bucketing.pad_rules.resampling import Axis, sampled_positions, scale_factor
from dynaxla.bucketing.pad_rules.windows import image_dims
from dynaxla.bucketing.padded_value import Dim, Operand, PaddedValue, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_fixed

aten = torch.ops.aten


@takes(padding=TRUE_SIZE)
def edge_pad_backward(call: RuleContext) -> PaddedValue:
    """Gradients go to the elements that the forward pass read, by the true edges; padded gradients are set to zero."""
    grad: PaddedValue = call["grad_output"]
    image = image_dims(call, grad)
    if has_fixed_images(call, image) and all(map(is_fixed, call["padding"])):
        return compute_per_image(call, image)
    mirrored = "reflection" in call.op_name
    wide = _widened(call)
    for d, dim in zip(image, image_dims_of_result(call, image), strict=True):
        wide = move_to_front(call, wide, d)
        front, _ = padding_of_dim(call["padding"], len(wide.dims), d)
        read = edge_positions(call, padded_size(wide.dims[d]), front, dim, mirrored)
        wide = _accumulate(call, wide, d, dim, [(read, None)])
    return _narrowed(call, wide)


@takes()
def adaptive_pool_backward(call: RuleContext) -> PaddedValue:
    """A window's gradient goes to the window's real elements; gradients of padded windows are zero."""
    grad: PaddedValue = call["grad_output"]
    image = image_dims(call, grad)
    if has_fixed_images(call, image):
        return compute_per_image(call, image)
    if "indices" in call.given:
        raise Unpaddable("the image's size varies")
    wide = _widened(call)
    for d, dim in zip(image, image_dims_of_result(call, image), strict=True):
        wide = _distribute_means(call, move_to_front(call, wide, d), d, dim)
    return _narrowed(call, wide)


@takes(
    output_size=TRUE_SIZE,
    input_size=TRUE_SIZE,
    scales=CONSTANT,
    scales_d=CONSTANT,
    scales_h=CONSTANT,
    scales_w=CONSTANT,
)
def upsample_backward(call: RuleContext) -> PaddedValue:
    """A gradient goes to the elements that its output read, times their weights; padded gradients are set to zero."""
    grad: PaddedValue = call["grad_output"]
    image = image_dims(call, grad)
    if has_fixed_images(call, image):
        return compute_per_image(call, image)
    make, build, wide = sampled_positions(call), call.build, _widened(call)
    for d, dim in zip(image, image_dims_of_result(call, image), strict=True):
        wide = move_to_front(call, wide, d)
        size, out = (build.scalar(single_factor(each).size) for each in (dim, wide.dims[d]))
        corners = bool(call.get("align_corners", False))
        # No `sides`: torch's backward uses the small images' formula at every size.
        settings = (scale_factor(call, len(wide.dims), d), wide.meta.dtype, corners, build.scalar(0))
        wide = _accumulate(call, wide, d, dim, make(Axis(build, size, out, padded_size(wide.dims[d]), *settings)))
    return _narrowed(call, wide)


def has_fixed_images(call: RuleContext, image: Sequence[int]) -> bool:
    """Whether the input and output images have fixed sizes."""
    return all(is_full(call["grad_output"].dims[d]) and is_fixed(call.true_sizes[d]) for d in image)


def compute_per_image(call: RuleContext, image: Sequence[int]) -> PaddedValue:
    """The result for images of fixed sizes, whose batch may be padded."""
    grad: PaddedValue = call["grad_output"]
    changed: dict[str, Operand] = {}
    for name, value in call.given.items():
        if isinstance(value, PaddedValue) and value is not grad:
            for d in range(image[0]):
                value = move_elements(call, value, d, grad.dims[d])
            changed[name] = value
    dims = (*grad.dims[: image[0]], *image_dims_of_result(call, image))
    if "input_size" in call.given:
        changed["input_size"] = [padded_size(d) for d in dims]
    return call.result(call.same(**changed), dims)


def image_dims_of_result(call: RuleContext, image: Sequence[int]) -> list[Dim]:
    """The image's dims in the result."""
    return [(call.build.factor(call.true_sizes[d]),) for d in image]


def _accumulate(
    call: RuleContext, grad: PaddedValue, place: int, dim: Dim, taps: Sequence[tuple[Node, Node | None]]
) -> PaddedValue:
    """Gradients times weights, accumulated at the positions of `dim` that the outputs read; padded gradients count as zero."""
    build, shape = call.build, list(grad.meta.shape)
    shape[place] = padded_size(dim)
    total = build.emit(aten.full.default, shape, 0, dtype=grad.meta.dtype, device=build.device)
    for positions, weights in taps:
        share = grad.node
        if weights is not None:
            share = build.emit(aten.mul.Tensor, share, broadcast_along(call, weights, len(shape), place))
        real = build.mask(PaddedValue(share, grad.dims), [place], 0)
        inside = build.emit(aten.clamp.default, positions, 0, padded_size(dim) - 1)
        total = build.emit(aten.index_add.default, total, place, inside, real.node)
    return PaddedValue(total, (*grad.dims[:place], dim, *grad.dims[place + 1 :]))


def _distribute_means(call: RuleContext, grad: PaddedValue, place: int, dim: Dim) -> PaddedValue:
    """Gradients of the means of windows, divided by the windows' lengths and summed for every element."""
    build, rank, dtype = call.build, len(grad.dims), grad.meta.dtype
    inside, lengths = pooling_windows(call, dim, grad.dims[place])
    divisors = broadcast_along(call, build.emit(aten._to_copy.default, lengths, dtype=dtype), rank, place)
    share = build.mask(PaddedValue(build.emit(aten.div.Tensor, grad.node, divisors), grad.dims), [place], 0)
    shape = [1] * (rank + 1)
    shape[place : place + 2] = padded_size(grad.dims[place]), padded_size(dim)
    zero = build.emit(aten.full.default, [], 0, dtype=dtype, device=build.device)
    spread = build.emit(aten.unsqueeze.default, share.node, place + 1)
    chosen = build.emit(aten.where.self, build.emit(aten.view.default, inside, shape), spread, zero)
    total = build.emit(aten.sum.dim_IntList, chosen, [place])
    return PaddedValue(total, (*grad.dims[:place], dim, *grad.dims[place + 1 :]))


def _widened(call: RuleContext) -> PaddedValue:
    grad: PaddedValue = call["grad_output"]
    wide = accumulation_dtype(grad.meta.dtype)
    if wide is grad.meta.dtype:
        return grad
    return PaddedValue(call.build.emit(aten._to_copy.default, grad.node, dtype=wide), grad.dims)


def _narrowed(call: RuleContext, grad: PaddedValue) -> PaddedValue:
    dtype, node = call["grad_output"].meta.dtype, grad.node
    if grad.meta.dtype is not dtype:
        node = call.build.emit(aten._to_copy.default, node, dtype=dtype)
    return call.result(node, grad.dims)
