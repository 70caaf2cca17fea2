"""The aten forms: ops as ATen calls that torch-mlir lowers correctly and as fast as the op's JAX body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dynaxla.ops.aten_calls import AtenCallBuilder
from dynaxla.ops.axes_and_dtypes import slice_bounds

aten = torch.ops.aten


def linear(call: AtenCallBuilder, x: Node, weight: Node, bias: Node | None = None) -> Node:
    """Linking fuses the transposes into the products. For one row the weight is the first operand, as XLA's CPU compiler is
    fastest with it."""
    if _shape(x)[0] == 1:
        product = call(aten.t.default, call(aten.mm.default, weight, call(aten.t.default, x)))
    else:
        product = call(aten.mm.default, x, call(aten.t.default, weight))
    return product if bias is None else call(aten.add.Tensor, product, bias)


def kernel_channels_last(call: AtenCallBuilder, weight: Node) -> Node:
    return call(aten.permute.default, weight, [*range(2, len(_shape(weight))), 1, 0])


def convolution_channels_last(
    call: AtenCallBuilder,
    x: Node,
    kernel: Node,
    bias: Node | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Node:
    """A 1x1 window is a matrix product; otherwise linking fuses the permutes into the convolution's dimension numbers."""
    dims = len(stride)
    *window, _, outputs = _shape(kernel)
    if groups == 1 and math.prod(window) == 1 and not any(padding):
        for dim, step in enumerate(stride, 1):
            x = x if step == 1 else call(aten.slice.Tensor, x, dim, 0, 2**63 - 1, step)
        rows = call(aten.reshape.default, x, [-1, _shape(x)[-1]])
        matrix = call(aten.reshape.default, kernel, [-1, outputs])
        result = call(aten.reshape.default, call(aten.mm.default, rows, matrix), [*_shape(x)[:-1], outputs])
    else:
        first = call(aten.permute.default, x, [0, dims + 1, *range(1, dims + 1)])
        weight = call(aten.permute.default, kernel, [dims + 1, dims, *range(dims)])
        settings = (stride, padding, dilation, False, [0] * dims, groups)
        result = call(aten.convolution.default, first, weight, None, *settings)
        result = call(aten.permute.default, result, [0, *range(2, dims + 2), 1])
    return result if bias is None else call(aten.add.Tensor, result, bias)


def attention(
    call: AtenCallBuilder, query: Node, key: Node, value: Node, mask: Node | None, is_causal: bool, scale: float | None
) -> tuple[Node, Node]:
    """Computes as the JAX body: weighted values are divided by the weights' sum, which is 1 if a query attends to nothing."""
    scores = _scores(call, query, key, mask, is_causal, scale)
    highest = call(aten.amax.default, scores, [-1], True)
    shift = call(aten.masked_fill.Scalar, highest, call(aten.eq.Scalar, highest, -math.inf), 0.0)
    weights = call(aten.exp.default, call(aten.sub.Tensor, scores, shift))
    total = call(aten.sum.dim_IntList, weights, [-1], True)
    mixed = _product(call, weights, value)
    nothing = call(aten.eq.Scalar, total, 0.0)
    divided = call(aten.div.Tensor, mixed, call(aten.masked_fill.Scalar, total, nothing, 1.0))
    output = call(aten.masked_fill.Scalar, divided, nothing, 0.0)
    logsumexp = call(aten.add.Tensor, call(aten.log.default, total), shift)
    return output, call(aten.squeeze.dim, logsumexp, -1)


def flash_attention_for_cpu(
    call: AtenCallBuilder,
    query: Node,
    key: Node,
    value: Node,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Node | None = None,
    scale: float | None = None,
) -> tuple[Node, Node]:
    del dropout_p  # the op's record refuses other values than 0
    return attention(call, query, key, value, attn_mask, is_causal, scale)


def _scores(
    call: AtenCallBuilder, query: Node, key: Node, mask: Node | None, is_causal: bool, scale: float | None
) -> Node:
    size = _shape(query)[-1]
    product = _product(call, query, call(aten.permute.default, key, [0, 1, 3, 2]))
    scores = call(aten.mul.Scalar, product, size**-0.5 if scale is None else scale)
    if is_causal:
        queries, keys = (call(aten.arange.start_step, 0, n, 1, dtype=torch.int64) for n in _shape(scores)[-2:])
        later = call(aten.gt.Tensor, call(aten.unsqueeze.default, keys, 0), call(aten.unsqueeze.default, queries, 1))
        scores = call(aten.masked_fill.Scalar, scores, later, -math.inf)
    if mask is None:
        return scores
    if mask.meta["val"].dtype == torch.bool:
        return call(aten.masked_fill.Scalar, scores, call(aten.logical_not.default, mask), -math.inf)
    return call(aten.add.Tensor, scores, mask)


def _product(call: AtenCallBuilder, left: Node, right: Node) -> Node:
    """The product [b, h, m, n] of left [b, h, m, k] and right [b, g, k, n]; every h/g heads of left share one of right."""
    batch, heads, rows, inner = _shape(left)
    groups, columns = _shape(right)[1], _shape(right)[3]
    left = call(aten.reshape.default, left, [batch * groups, heads // groups * rows, inner])
    right = call(aten.reshape.default, right, [batch * groups, inner, columns])
    return call(aten.reshape.default, call(aten.bmm.default, left, right), [batch, heads, rows, columns])


def split(call: AtenCallBuilder, x: Node, size: int, dim: int = 0) -> tuple[Node, ...]:
    whole = _shape(x)[dim]
    return _pieces(call, x, [min(size, whole - start) for start in range(0, whole, size)], dim)


def split_with_sizes(call: AtenCallBuilder, x: Node, sizes: Sequence[int], dim: int = 0) -> tuple[Node, ...]:
    return _pieces(call, x, sizes, dim)


def _pieces(call: AtenCallBuilder, x: Node, sizes: Sequence[int], dim: int) -> tuple[Node, ...]:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    pairs = zip(sizes, ends, strict=True)
    return tuple(call(aten.slice.Tensor, x, dim, end - size, end, 1) for size, end in pairs)


def slice_scatter(
    call: AtenCallBuilder,
    x: Node,
    src: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node:
    """Clamps `end` first: torch-mlir makes an index tensor up to `end`, which for `x[1:]` exceeds all memory."""
    first, last = slice_bounds(_shape(x)[dim], start, end)
    return call(aten.slice_scatter.default, x, src, dim, first, last, step)


def slice_backward(
    call: AtenCallBuilder, grad: Node, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Node:
    """Pads where it can, which XLA computes within other ops; a scatter it does not."""
    size, axis = input_sizes[dim], dim % len(input_sizes)
    first, _ = slice_bounds(size, start, end)
    if step == 1:
        behind = size - first - _shape(grad)[axis]
        pads = [*(0, 0) * (len(input_sizes) - 1 - axis), first, behind]
        return call(aten.constant_pad_nd.default, grad, pads, 0)
    zeros = call(aten.full.default, list(input_sizes), 0, dtype=grad.meta["val"].dtype)
    return slice_scatter(call, zeros, grad, dim, start, end, step)


def max_of_all(call: AtenCallBuilder, x: Node) -> Node:
    """Of rows first: XLA's loop over all elements at once takes five times as long on the CPU."""
    return call(aten.amax.default, x, [], False)


def min_of_all(call: AtenCallBuilder, x: Node) -> Node:
    return call(aten.amin.default, x, [], False)


def unbind(call: AtenCallBuilder, x: Node, dim: int = 0) -> tuple[Node, ...]:
    return tuple(call(aten.select.int, x, dim, place) for place in range(_shape(x)[dim]))


def alias(call: AtenCallBuilder, x: Node) -> Node:
    return call(aten.clone.default, x)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
