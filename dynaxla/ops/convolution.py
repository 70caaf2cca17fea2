"""Convolutions in torch's layout (channels first): transposed ones, and those that the channels-last pass does not rewrite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import window_gradients as window_gradients_rules
from dynaxla.bucketing.pad_rules import windows as windows_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.ops import aten_forms
from dynaxla.ops.channels_last import convolve, convolve_by_columns, has_small_columns
from dynaxla.ops.convolution_windows import ConvolutionWindows
from dynaxla.ops.dtypes import REAL_NUMBERS, WIDE_FLOATS
from dynaxla.ops.eager_errors import check_all, check_one_dtype
from dynaxla.ops.promotion import JNP_DTYPES, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
OPS = OpFamily()


def check_output_padding(node: Node) -> str | None:
    """Refuses more rows behind a transposed convolution than a step or a dilation has: torch's fake kernel does not look."""
    given = arguments_of(node)
    extra, stride, dilation = given["output_padding"], given["stride"], given["dilation"]
    steps = max(len(extra), len(stride), len(dilation))
    each = zip(*(_per_dim(numbers, steps) for numbers in (extra, stride, dilation)), strict=True)
    wrong = given["transposed"] and any(more >= step and more >= apart for more, step, apart in each)
    return f"output padding {extra}" if wrong else None


@OPS.op(
    aten.convolution.default,
    check=check_all(check_one_dtype, check_output_padding),
    dtypes=REAL_NUMBERS,
    pad=windows_rules.convolution,
)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Array:
    """x is [n, c, *space]; weight is [o, c/groups, *window], or [c, o/groups, *window] if transposed.

    Of no channels torch makes no channels, whatever the weight's number of them is.
    """
    dims = x.ndim - 2
    stride, padding, dilation = (_per_dim(v, dims) for v in (stride, padding, dilation))
    if transposed:
        result = _transposed(x, weight, stride, padding, dilation, _per_dim(output_padding, dims), groups)
    else:
        result = _convolve(x, weight, stride, [(p, p) for p in padding], dilation, groups)
    if bias is not None:
        result = result + bias.astype(result.dtype).reshape(-1, *[1] * dims)
    if not transposed and not x.shape[1]:
        result = result[:, :0]
    return result.astype(x.dtype)


@OPS.op(aten.convolution_backward.default, dtypes=REAL_NUMBERS, pad=window_gradients_rules.convolution_backward)
def convolution_backward(
    grad_output: Array,
    x: Array,
    weight: Array,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """Gradients of (input, weight, bias); None for those that `output_mask` excludes."""

    def forward(x: Array, weight: Array) -> Array:
        return convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    _, backward = jax.vjp(forward, x, weight)
    grad_x, grad_weight = backward(grad_output)
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(grad_output))]
    grad_bias = jnp.sum(grad_output.astype(wide), (0, *range(2, x.ndim))).astype(grad_output.dtype)
    if not grad_output.shape[1] and bias_sizes:  # of no channels
        grad_bias = jnp.zeros(bias_sizes, grad_output.dtype)
    grads = (grad_x, grad_weight, grad_bias)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, output_mask, strict=True))


def _per_dim(values: Sequence[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)


def _convolve(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    input_dilation: Sequence[int] | None = None,
) -> Array:
    # A 16-bit float is summed in float32: widened first, because the derivative of a product with an
    # `preferred_element_type` of its own mixes dtypes.
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(x))]
    moved, weight = jnp.moveaxis(x.astype(wide), 1, -1), weight.astype(wide)
    spread, highest = input_dilation or [1] * len(stride), lax.Precision.HIGHEST

    def by_windows(moved: Array, weight: Array) -> Array:
        kernel = jnp.moveaxis(weight, (0, 1), (-1, -2))
        return convolve(moved, kernel, stride, padding, dilation, groups, spread, highest)

    def by_columns(moved: Array, weight: Array) -> Array:
        windows = ConvolutionWindows(tuple(stride), tuple(padding), tuple(dilation), tuple(spread))
        return convolve_by_columns(moved, weight, windows, highest)

    places = math.prod(jax.eval_shape(by_windows, moved, weight).shape[:-1])
    edges = [edge for pair in padding for edge in pair]
    if input_dilation is None and has_small_columns(places, weight.shape, edges, groups, is_permuted=False):
        result = lax.platform_dependent(moved, weight, cpu=by_columns, default=by_windows)
    else:
        result = by_windows(moved, weight)
    return jnp.moveaxis(result, -1, 1)


def _transposed(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """A transposed convolution: a convolution of the input, dilated by the stride, with the flipped kernel."""
    inputs, outputs, *window = weight.shape
    kernel = weight.reshape(groups, inputs // groups, outputs, *window)
    kernel = jnp.moveaxis(kernel, 1, 2).reshape(groups * outputs, inputs // groups, *window)
    kernel = jnp.flip(kernel, range(2, kernel.ndim))
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    edges = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
    return _convolve(x, kernel, [1] * len(window), edges, dilation, groups, input_dilation=stride)


@OPS.op(internal.KERNEL, pad=windows_rules.permute_weight, as_aten=aten_forms.kernel_channels_last)
def kernel_channels_last(weight: Array) -> Array:
    return jnp.transpose(weight, (*range(2, weight.ndim), 1, 0))


def _has_groups_or_volumes(call: Node) -> bool:
    x: Any = call.args[0]
    return call.args[-1] != 1 or x.meta["val"].dim() == 5  # type: ignore[return-value]


_SLOWER = "XLA's convolution of groups takes 3 to 30 times as long as the body, that of volumes 2 to 6 times"


@OPS.op(
    internal.CONVOLUTION,
    check=check_one_dtype,
    pad=windows_rules.convolution,
    as_aten=aten_forms.convolution_channels_last,
    torch_mlir=(Finding(Verdict.SLOWER, WIDE_FLOATS, _SLOWER, frozenset({"cpu"}), _has_groups_or_volumes),),
)
def convolution_channels_last(
    x: Array, kernel: Array, bias: Array | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Array:
    result = convolve(x, kernel, stride, [(p, p) for p in padding], dilation, groups)
    return result if bias is None else result + bias
