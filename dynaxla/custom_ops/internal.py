"""The package's own operators, which rewrites introduce into a captured graph.

They are ordinary torch operators with an eager implementation, so that a graph that contains them still runs in eager.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

linear_op = "dynaxla::linear"
convolution_op = "dynaxla::convolution_channels_last"
kernel_op = "dynaxla::kernel_channels_last"


@torch.library.custom_op(linear_op, mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., m, k], weight [n, k], bias broadcastable to [m, n] or None; returns [..., m, n].

    XLA's CPU emitter copies an explicitly transposed weight at every call of a one-row product (twenty times the
    product's own time); contracting the weight's second dim reads it in index.
    """
    product = x @ weight.t()
    return product if bias is None else product + bias


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


@torch.library.custom_op("dynaxla::contract_rows", mutates_args=())
def contract_rows(left: Tensor, right: Tensor) -> Tensor:
    """The sum over all rows of `left[row].T @ right[row]`: left [*rows, n], right [*rows, k]; returns [n, k]."""
    return left.flatten(0, -2).t() @ right.flatten(0, -2)


@contract_rows.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty([left.shape[-1], right.shape[-1]])


@torch.library.custom_op(kernel_op, mutates_args=())
def kernel_channels_last(weight: Tensor) -> Tensor:
    """Permutes a convolution weight [out, in/groups, *window] to [*window, in/groups, out], row-major.

    It is an operator of its own so that weight folding finds it: it depends on a parameter alone and runs once per
    weight version.
    """
    return weight.permute(*range(2, weight.dim()), 1, 0).clone(memory_format=torch.contiguous_format)


@kernel_channels_last.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty([*weight.shape[2:], weight.shape[1], weight.shape[0]])


@torch.library.custom_op(convolution_op, mutates_args=())
def convolution_channels_last(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Convolution with channels last: x [n, *spatial, in], kernel [*window, in/groups, out]; returns [n, *spatial', out]."""
    spatial = range(1, x.dim() - 1)
    first = x.permute(0, x.dim() - 1, *spatial)
    weight = kernel.permute(kernel.dim() - 1, kernel.dim() - 2, *range(kernel.dim() - 2))
    zeros = [0] * len(stride)
    result = torch.ops.aten.convolution(first, weight, bias, stride, padding, dilation, False, zeros, groups)
    last: Tensor = result.permute(0, *range(2, x.dim()), 1).contiguous()
    return last


@convolution_channels_last.register_fake
def _(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    windows = zip(x.shape[1:-1], kernel.shape[:-2], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * pad - gap * (window - 1) - 1) // step + 1 for size, window, step, pad, gap in windows]
    return x.new_empty([x.shape[0], *spatial, kernel.shape[-1]])


@torch.library.custom_op("dynaxla::batched_product", mutates_args=())
def batched_product(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` of stacks of matrices: x [b, c, m, k], y [b, c, k, n]; returns [b, c, m, n]."""
    return x @ y


@batched_product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty([*x.shape[:-1], y.shape[-1]])


@torch.library.custom_op("dynaxla::gather_strided", mutates_args=())
def gather_strided(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """Copies `as_strided` of a row-major copy of a tensor, so that the offset counts from its first element.

    It has its own name because torch-mlir's importer rewrites `aten.as_strided` itself and raises for graphs without a module.
    """
    row_major = x.clone(memory_format=torch.contiguous_format)
    return row_major.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


@gather_strided.register_fake
def _(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    return x.new_empty(size)


@torch.library.custom_op("dynaxla::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Computes the attention of all fused ops of torch: query [b, h, q, e], key [b, g, k, e], value [b, g, k, v], g divides h.

    Returns the output [b, h, q, v], and the log of the summed exponentials of the scores [b, h, q] in float32 or
    float64.
    """
    scores = _scores(query, key, mask, is_causal, scale)
    logsumexp = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0)[..., None])
    shared = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (weights @ shared.to(weights.dtype)).to(query.dtype), logsumexp


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    like_query = query.shape[-1] == value.shape[-1]
    output = torch.empty_like(query) if like_query else query.new_empty([*query.shape[:-1], value.shape[-1]])
    return output, query.new_empty(query.shape[:-1], dtype=wide)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shared = key.repeat_interleave(query.shape[1] // key.shape[1], 1).to(wide)
    scores = (query.to(wide) @ shared.mT) * _factor(query, scale)
    if is_causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril(), -torch.inf
        )
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _factor(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


@torch.library.custom_op("dynaxla::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of `attention`, given its results."""
    heads, groups = query.shape[1], key.shape[1]
    scores = _scores(query, key, mask, is_causal, scale)
    weights = torch.exp(scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0)[..., None])
    wide = weights.dtype
    shared_key, shared_value = (x.repeat_interleave(heads // groups, 1).to(wide) for x in (key, value))
    correction = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    slope = weights * (grad.to(wide) @ shared_value.mT - correction) * _factor(query, scale)
    grad_key, grad_value = (
        (mixed.mT @ x.to(wide)).unflatten(1, (groups, -1)).sum(2) for mixed, x in ((slope, query), (weights, grad))
    )
    return (slope @ shared_key).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@torch.library.custom_op("dynaxla::attention_of_segments", mutates_args=())
def attention_of_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: list[Tensor],
    ids: list[Tensor],
    is_causal: bool,
    scale: float | None,
    saves: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attention` whose mask is told by rows, not by every query and key: what a kernel takes without such a mask in memory.

    Args:
        kept: bools [1 or b, 1, 1, k] or like them: a query attends to keys for which all hold.
        ids: none, or two: integers of queries [1 or b, 1, q, 1] and of keys [1 or b, 1, 1, k], which must be equal.
        saves: whether the logsumexp is read; else it may be NaN.
    """
    results: tuple[Tensor, Tensor] = ATTENTION(query, key, value, _mask_of_segments(kept, ids), is_causal, scale)
    return results


@attention_of_segments.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: list[Tensor],
    ids: list[Tensor],
    is_causal: bool,
    scale: float | None,
    saves: bool = True,
) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = ATTENTION(query, key, value, None, is_causal, scale)
    return results


@torch.library.custom_op("dynaxla::attention_of_segments_backward", mutates_args=())
def attention_of_segments_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: list[Tensor],
    ids: list[Tensor],
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of `attention_of_segments`, given its results."""
    mask = _mask_of_segments(kept, ids)
    grads: tuple[Tensor, Tensor, Tensor] = ATTENTION_BACKWARD(
        grad, query, key, value, mask, out, logsumexp, is_causal, scale
    )
    return grads


@attention_of_segments_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: list[Tensor],
    ids: list[Tensor],
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _mask_of_segments(kept: list[Tensor], ids: list[Tensor]) -> Tensor | None:
    factors = [*kept, ids[0] == ids[1]] if ids else kept
    return functools.reduce(torch.logical_and, factors) if factors else None


@torch.library.custom_op("dynaxla::grouped_product", mutates_args=())
def grouped_product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiplies rows of input [s, k], in groups that end at offs [g], by their group's weight [g, k, n]; returns [s, n].

    Mixtures of experts use it. Rows after the last group are zero.
    """
    output = input.new_zeros(input.shape[0], weight.shape[2])
    start = 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        output[start:end] = input[start:end] @ matrix
        start = end
    return output


@grouped_product.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


@torch.library.custom_op("dynaxla::group_products", mutates_args=())
def group_products(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """Returns `left[rows].T @ right[rows]` per group of rows, [g, k, n]: left [s, k], right [s, n], groups end at offs
    [g].

    The gradient of `grouped_product`'s weight.
    """
    output = left.new_zeros(offs.shape[0], left.shape[1], right.shape[1])
    start = 0
    for index, end in enumerate(offs.tolist()):
        output[index] = left[start:end].T @ right[start:end]
        start = end
    return output


@group_products.register_fake
def _(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    return left.new_empty(offs.shape[0], left.shape[1], right.shape[1])


@torch.library.custom_op("dynaxla::sample_grid", mutates_args=())
def sample_grid(
    x: Tensor, grid: Tensor, sizes: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Computes `aten.grid_sampler_2d` (or 3d) on the first `sizes` elements of an image along its spatial axes."""
    sampled: Tensor = _GRID_SAMPLERS[x.dim()](_front(x, sizes), grid, interpolation_mode, padding_mode, align_corners)
    return sampled


@sample_grid.register_fake
def _(
    x: Tensor, grid: Tensor, sizes: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    return x.new_empty([*x.shape[:2], *grid.shape[1:-1]])


@torch.library.custom_op("dynaxla::sample_grid_backward", mutates_args=())
def sample_grid_backward(
    grad: Tensor,
    x: Tensor,
    grid: Tensor,
    sizes: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of image and grid; the image's padding has the gradient zero."""
    front, backward = _front(x, sizes), _GRID_SAMPLERS_BACKWARD[x.dim()]
    by_image, by_grid = backward(grad, front, grid, interpolation_mode, padding_mode, align_corners, [True, True])
    whole = torch.zeros_like(x)
    _front(whole, sizes).copy_(by_image)
    return whole, by_grid


@sample_grid_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    grid: Tensor,
    sizes: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(grid)


def _front(x: Tensor, sizes: Tensor) -> Tensor:
    return x[(slice(None), slice(None), *(slice(size) for size in sizes.tolist()))]


_GRID_SAMPLERS = {4: torch.ops.aten.grid_sampler_2d, 5: torch.ops.aten.grid_sampler_3d}
_GRID_SAMPLERS_BACKWARD = {4: torch.ops.aten.grid_sampler_2d_backward, 5: torch.ops.aten.grid_sampler_3d_backward}

LINEAR = torch.ops.dynaxla.linear.default
CONTRACT_ROWS = torch.ops.dynaxla.contract_rows.default
BATCHED_PRODUCT = torch.ops.dynaxla.batched_product.default
KERNEL = torch.ops.dynaxla.kernel_channels_last.default
CONVOLUTION = torch.ops.dynaxla.convolution_channels_last.default
GATHER_STRIDED = torch.ops.dynaxla.gather_strided.default
ATTENTION = torch.ops.dynaxla.attention.default
ATTENTION_BACKWARD = torch.ops.dynaxla.attention_backward.default
ATTENTION_OF_SEGMENTS = torch.ops.dynaxla.attention_of_segments.default
ATTENTION_OF_SEGMENTS_BACKWARD = torch.ops.dynaxla.attention_of_segments_backward.default
GROUPED_PRODUCT = torch.ops.dynaxla.grouped_product.default
GROUP_PRODUCTS = torch.ops.dynaxla.group_products.default
SAMPLE_GRID = torch.ops.dynaxla.sample_grid.default
SAMPLE_GRID_BACKWARD = torch.ops.dynaxla.sample_grid_backward.default
