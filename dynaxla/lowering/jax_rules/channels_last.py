"""Convolutions with channels last; on the CPU a depthwise one is a sum of products, one of single places a product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from dynaxla.lowering.jax_rules.promotion import cast, opmath_dtype, torch_dtype

MOST_PLACES = 128
"""Windows with more places than this are left to XLA: each place is three operations to compile."""

Edges = Sequence[tuple[int, int]]


def convolve(
    x: Array,
    kernel: Array,
    stride: Sequence[int],
    edges: Edges,
    dilation: Sequence[int],
    groups: int,
    spread: Sequence[int] | None = None,
    precision: lax.Precision | None = None,
) -> Array:
    """The convolution of x [n, *space, c] with kernel [*window, c/groups, o].

    On the CPU, XLA's own depthwise convolution takes 8 to 30 times (float64: 5 to 16 times) as long as a sum of products,
    and in float64 it is a product with a matrix that is zero across channels, which takes a NaN or infinity of one channel
    to all. A convolution whose window is one place takes up to twice as long there as the matrix product that it is.

    Args:
        edges: zeros before and after each axis of space; negative ones cut off.
        spread: distances of neighbours after the axes of space are spread out, as transposed convolutions need.
    """
    dims = x.ndim - 2
    spread = spread or [1] * dims

    def whole(x: Array, kernel: Array) -> Array:
        space = "DHW"[3 - dims :]
        layout = (f"N{space}C", f"{space}IO", f"N{space}C")
        return lax.conv_general_dilated(x, kernel, stride, edges, spread, dilation, layout, groups, precision=precision)

    def depthwise(x: Array, kernel: Array) -> Array:
        pads = [(before, after, gap - 1) for (before, after), gap in zip(edges, spread, strict=True)]
        return _sum_of_products(x, kernel, stride, pads, dilation)

    def pointwise(x: Array, kernel: Array) -> Array:
        return _product(x, kernel, stride, precision)

    places = math.prod(kernel.shape[:dims])
    on_cpu = None
    if groups == 1 and places == 1 and set(spread) == {1} and not any(itertools.chain(*edges)):
        on_cpu = pointwise
    elif groups == x.shape[-1] > 1 and places <= MOST_PLACES:
        on_cpu = depthwise
    result: Array = whole(x, kernel) if on_cpu is None else lax.platform_dependent(x, kernel, cpu=on_cpu, default=whole)
    return result


def _product(x: Array, kernel: Array, stride: Sequence[int], precision: lax.Precision | None) -> Array:
    x = x[:, *(slice(None, None, step) for step in stride)]
    rows = x.reshape(-1, x.shape[-1])
    contract = (((1,), (0,)), ((), ()))
    product: Array = lax.dot_general(rows, kernel.reshape(kernel.shape[-2:]), contract, precision=precision)
    return product.reshape(*x.shape[:-1], -1)


def _sum_of_products(
    x: Array, kernel: Array, stride: Sequence[int], pads: Sequence[tuple[int, int, int]], dilation: Sequence[int]
) -> Array:
    dtype = torch_dtype(x)
    wide = opmath_dtype(dtype)
    *window, _, outputs = kernel.shape
    x, kernel = cast(x, wide), cast(kernel, wide)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    x = jnp.repeat(x, outputs // x.shape[-1], -1)
    # How far each axis' first place travels: whole strides, as long as the window's last place stays inside.
    ways = [(n - d * (w - 1) - 1) // s * s for n, d, w, s in zip(x.shape[1:-1], dilation, window, stride, strict=True)]
    total: Array | None = None
    for place in itertools.product(*map(range, window)):
        first = [p * d for p, d in zip(place, dilation, strict=True)]
        stop = [start + way + 1 for start, way in zip(first, ways, strict=True)]
        seen = lax.slice(x, (0, *first, 0), (len(x), *stop, outputs), (1, *stride, 1))
        product = seen * kernel[place][0]
        total = product if total is None else total + product
    assert total is not None
    # As if the sum had begun with 0: without this, zeros times negative weights would be -0. XLA drops a `0 +`.
    return cast(jnp.where(total == 0, 0, total), dtype)
