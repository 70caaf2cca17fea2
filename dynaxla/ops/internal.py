"""The package's own operators, which rewrites introduce into a captured graph.

They are ordinary torch operators with an eager implementation, so that a graph that holds them still runs in eager.
"""

from __future__ import annotations

import torch
from torch import Tensor

linear_op = "dynaxla::linear"
convolution_op = "dynaxla::convolution_channels_last"
kernel_op = "dynaxla::kernel_channels_last"


@torch.library.custom_op(linear_op, mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [m, k], weight [n, k], bias broadcastable to [m, n] or None; gives [m, n].

    XLA's CPU emitter copies an explicitly transposed weight at every call of a one-row product (twenty times the
    product's own time); contracting the weight's second dim reads it where it lies.
    """
    product = x @ weight.t()
    return product if bias is None else product + bias


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op(kernel_op, mutates_args=())
def kernel_channels_last(weight: Tensor) -> Tensor:
    """A convolution weight [out, in/groups, *window] as [*window, in/groups, out], row-major.

    An operator of its own so that it is seen as work that depends on a parameter alone and done once per weight version.
    """
    return weight.permute(*range(2, weight.dim()), 1, 0).contiguous()


@kernel_channels_last.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty([*weight.shape[2:], weight.shape[1], weight.shape[0]])


@torch.library.custom_op(convolution_op, mutates_args=())
def convolution_channels_last(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """Convolution with channels last: x [n, *spatial, in], kernel [*window, in/groups, out]; gives [n, *spatial', out]."""
    spatial = range(1, x.dim() - 1)
    first = x.permute(0, x.dim() - 1, *spatial)
    weight = kernel.permute(kernel.dim() - 1, kernel.dim() - 2, *range(kernel.dim() - 2))
    zeros = [0] * len(stride)
    result = torch.ops.aten.convolution(first, weight, bias, stride, padding, dilation, False, zeros, groups)
    return result.permute(0, *range(2, x.dim()), 1).contiguous()


@convolution_channels_last.register_fake
def _(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    windows = zip(x.shape[1:-1], kernel.shape[:-2], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * pad - gap * (window - 1) - 1) // step + 1 for size, window, step, pad, gap in windows]
    return x.new_empty([x.shape[0], *spatial, kernel.shape[-1]])


@torch.library.custom_op("dynaxla::gather_strided", mutates_args=())
def gather_strided(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """`as_strided` of a row-major tensor that starts its storage, as a copy.

    Under another name because torch-mlir's importer rewrites `aten.as_strided` itself and refuses graphs without a module.
    """
    return x.contiguous().as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


@gather_strided.register_fake
def _(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    return x.new_empty(size)


LINEAR = torch.ops.dynaxla.linear.default
KERNEL = torch.ops.dynaxla.kernel_channels_last.default
CONVOLUTION = torch.ops.dynaxla.convolution_channels_last.default
GATHER_STRIDED = torch.ops.dynaxla.gather_strided.default
