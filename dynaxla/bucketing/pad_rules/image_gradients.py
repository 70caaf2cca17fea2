"""Rules of the gradients of edge padding, adaptive pooling and interpolation: inputs get the gradients of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.adaptive_pooling import parts
from dynaxla.bucketing.pad_rules.alignment import relaid
from dynaxla.bucketing.pad_rules.contiguous import along, fronted
from dynaxla.bucketing.pad_rules.padding import amounts_of, repeated_places
from dynaxla.bucketing.pad_rules.reductions import widened
from dynaxla.bucketing.pad_rules.resampling import Axis, factor_of, taps_of
from dynaxla.bucketing.pad_rules.windows import image_dims
from dynaxla.bucketing.padded_value import Dim, Operand, Padded, Unpaddable, is_full, places, run_of
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import is_fixed

aten = torch.ops.aten


@takes(padding=TRUE_SIZE)
def repeated_edges_backward(call: Call) -> Padded:
    """Gradients go to the elements that the forward pass read, by the true edges; padded gradients are set to zero."""
    grad: Padded = call["grad_output"]
    image = image_dims(call, grad)
    if _is_per_image(call, image) and all(map(is_fixed, call["padding"])):
        return _per_image_result(call, image)
    mirrored = "reflection" in call.op_name
    wide = _widened(call)
    for d, dim in zip(image, _result_dims(call, image), strict=True):
        wide = fronted(call, wide, d)
        front, _ = amounts_of(call["padding"], len(wide.dims), d)
        read = repeated_places(call, places(wide.dims[d]), front, dim, mirrored)
        wide = _accumulate(call, wide, d, dim, [(read, None)])
    return _narrowed(call, wide)


@takes()
def adaptive_pool_backward(call: Call) -> Padded:
    """A window's gradient goes to the window's real elements; gradients of padded windows are zero."""
    grad: Padded = call["grad_output"]
    image = image_dims(call, grad)
    if _is_per_image(call, image):
        return _per_image_result(call, image)
    if "indices" in call.given:
        raise Unpaddable("the image's size varies")
    wide = _widened(call)
    for d, dim in zip(image, _result_dims(call, image), strict=True):
        wide = _distribute_means(call, fronted(call, wide, d), d, dim)
    return _narrowed(call, wide)


@takes(
    output_size=TRUE_SIZE,
    input_size=TRUE_SIZE,
    scales=CONSTANT,
    scales_d=CONSTANT,
    scales_h=CONSTANT,
    scales_w=CONSTANT,
)
def upsample_backward(call: Call) -> Padded:
    """A gradient goes to the elements that its output read, times their weights; padded gradients are set to zero."""
    grad: Padded = call["grad_output"]
    image = image_dims(call, grad)
    if _is_per_image(call, image):
        return _per_image_result(call, image)
    make, build, wide = taps_of(call), call.build, _widened(call)
    for d, dim in zip(image, _result_dims(call, image), strict=True):
        wide = fronted(call, wide, d)
        size, out = (build.scalar(run_of(each).size) for each in (dim, wide.dims[d]))
        corners = bool(call.get("align_corners", False))
        # No `sides`: torch's backward uses the small images' formula at every size.
        settings = (factor_of(call, len(wide.dims), d), wide.meta.dtype, corners, build.scalar(0))
        wide = _accumulate(call, wide, d, dim, make(Axis(build, size, out, places(wide.dims[d]), *settings)))
    return _narrowed(call, wide)


def _is_per_image(call: Call, image: Sequence[int]) -> bool:
    """Whether the input and output images have fixed sizes."""
    return all(is_full(call["grad_output"].dims[d]) and is_fixed(call.true_sizes[d]) for d in image)


def _per_image_result(call: Call, image: Sequence[int]) -> Padded:
    """The result for images of fixed sizes, whose batch may be padded."""
    grad: Padded = call["grad_output"]
    changed: dict[str, Operand] = {}
    for name, value in call.given.items():
        if isinstance(value, Padded) and value is not grad:
            for d in range(image[0]):
                value = relaid(call, value, d, grad.dims[d])
            changed[name] = value
    dims = (*grad.dims[: image[0]], *_result_dims(call, image))
    if "input_size" in call.given:
        changed["input_size"] = [places(d) for d in dims]
    return call.result(call.same(**changed), dims)


def _result_dims(call: Call, image: Sequence[int]) -> list[Dim]:
    """The image's dims in the result."""
    return [(call.build.factor(call.true_sizes[d]),) for d in image]


def _accumulate(call: Call, grad: Padded, place: int, dim: Dim, taps: Sequence[tuple[Node, Node | None]]) -> Padded:
    """Gradients times weights, accumulated at the positions of `dim` that the outputs read; padded gradients count as zero."""
    build, shape = call.build, list(grad.meta.shape)
    shape[place] = places(dim)
    total = build.emit(aten.full.default, shape, 0, dtype=grad.meta.dtype, device=build.device)
    for positions, weights in taps:
        share = grad.node
        if weights is not None:
            share = build.emit(aten.mul.Tensor, share, along(call, weights, len(shape), place))
        real = build.mask(Padded(share, grad.dims), [place], 0)
        inside = build.emit(aten.clamp.default, positions, 0, places(dim) - 1)
        total = build.emit(aten.index_add.default, total, place, inside, real.node)
    return Padded(total, (*grad.dims[:place], dim, *grad.dims[place + 1 :]))


def _distribute_means(call: Call, grad: Padded, place: int, dim: Dim) -> Padded:
    """Gradients of the means of windows, divided by the windows' lengths and summed for every element."""
    build, rank, dtype = call.build, len(grad.dims), grad.meta.dtype
    inside, lengths = parts(call, dim, grad.dims[place])
    divisors = along(call, build.emit(aten._to_copy.default, lengths, dtype=dtype), rank, place)
    share = build.mask(Padded(build.emit(aten.div.Tensor, grad.node, divisors), grad.dims), [place], 0)
    shape = [1] * (rank + 1)
    shape[place : place + 2] = places(grad.dims[place]), places(dim)
    zero = build.emit(aten.full.default, [], 0, dtype=dtype, device=build.device)
    spread = build.emit(aten.unsqueeze.default, share.node, place + 1)
    chosen = build.emit(aten.where.self, build.emit(aten.view.default, inside, shape), spread, zero)
    total = build.emit(aten.sum.dim_IntList, chosen, [place])
    return Padded(total, (*grad.dims[:place], dim, *grad.dims[place + 1 :]))


def _widened(call: Call) -> Padded:
    grad: Padded = call["grad_output"]
    wide = widened(grad.meta.dtype)
    if wide is grad.meta.dtype:
        return grad
    return Padded(call.build.emit(aten._to_copy.default, grad.node, dtype=wide), grad.dims)


def _narrowed(call: Call, grad: Padded) -> Padded:
    dtype, node = call["grad_output"].meta.dtype, grad.node
    if grad.meta.dtype is not dtype:
        node = call.build.emit(aten._to_copy.default, node, dtype=dtype)
    return call.result(node, grad.dims)
