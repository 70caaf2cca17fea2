"""Convolutions with channels last; on the CPU, depthwise ones are sums of products, 1x1 ones matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype

MAX_WINDOW_ELEMENTS = 128
"""Depthwise windows with more elements than this are left to XLA, as each element adds three operations to compile."""

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
    and in float64 it is a product with a matrix that is zero across channels, which spreads NaN or infinity from one channel
    to all. XLA's 1x1 convolution takes up to twice as long there as the equal matrix product.

    Args:
        edges: zero padding before and after each spatial axis; negative values crop.
        spread: the input's dilation along the spatial axes, for transposed convolutions.
    """
    dims = x.ndim - 2
    spread = spread or [1] * dims

    def whole(x: Array, kernel: Array) -> Array:
        space = "DHW"[3 - dims :]
        layout = (f"N{space}C", f"{space}IO", f"N{space}C")
        return lax.conv_general_dilated(x, kernel, stride, edges, spread, dilation, layout, groups, precision=precision)

    def depthwise(x: Array, kernel: Array) -> Array:
        return _depthwise(x, kernel, ConvolutionWindows(tuple(stride), tuple(edges), tuple(dilation), tuple(spread)))

    def pointwise(x: Array, kernel: Array) -> Array:
        return _product(x, kernel, stride, precision)

    places = math.prod(kernel.shape[:dims])
    on_cpu = None
    if groups == 1 and places == 1 and set(spread) == {1} and not any(itertools.chain(*edges)):
        on_cpu = pointwise
    elif groups == x.shape[-1] > 1 and places <= MAX_WINDOW_ELEMENTS:
        on_cpu = depthwise
    result: Array = whole(x, kernel) if on_cpu is None else lax.platform_dependent(x, kernel, cpu=on_cpu, default=whole)
    return result


def _product(x: Array, kernel: Array, stride: Sequence[int], precision: lax.Precision | None) -> Array:
    x = x[:, *(slice(None, None, step) for step in stride)]
    rows = x.reshape(-1, x.shape[-1])
    contract = (((1,), (0,)), ((), ()))
    product: Array = lax.dot_general(rows, kernel.reshape(kernel.shape[-2:]), contract, precision=precision)
    return product.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class ConvolutionWindows:
    """The window parameters of a convolution, see `convolve`."""

    stride: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...]

    def padded(self, x: Array) -> Array:
        """x, dilated by `spread` and padded by `edges`."""
        pads = [(before, after, gap - 1) for (before, after), gap in zip(self.edges, self.spread, strict=True)]
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])

    def places(self, x: Array, window: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yields each position in the window, with the elements of x [n, *space, c] that it reads."""
        x = self.padded(x)
        # The offset of the last window's start on each axis: a multiple of the stride, with the whole window in bounds.
        sizes = zip(x.shape[1:-1], self.dilation, window, self.stride, strict=True)
        ways = [(n - d * (w - 1) - 1) // s * s for n, d, w, s in sizes]
        for place in itertools.product(*map(range, window)):
            first = [p * d for p, d in zip(place, self.dilation, strict=True)]
            stop = [start + way + 1 for start, way in zip(first, ways, strict=True)]
            yield place, lax.slice(x, (0, *first, 0), (len(x), *stop, x.shape[-1]), (1, *self.stride, 1))

    def turned(self, space: Sequence[int], seen: Sequence[int], window: Sequence[int]) -> ConvolutionWindows:
        """The windows of the input gradient: a convolution of the output gradient, of sizes `seen`, with the flipped kernel."""
        edges = []
        for size, count, w, s, (before, after), d, gap in zip(
            space, seen, window, self.stride, self.edges, self.dilation, self.spread, strict=True
        ):
            reach, padded = d * (w - 1), before + (size - 1) * gap + 1 + after
            edges.append((reach - before, padded - after - (count - 1) * s - 1))
        return ConvolutionWindows(self.spread, tuple(edges), self.dilation, self.stride)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _depthwise(x: Array, kernel: Array, windows: ConvolutionWindows) -> Array:
    """A depthwise convolution as a sum of products. It has its own vjp: JAX's would make a padded copy per window element,
    which XLA takes minutes to compile, and would be zero wherever the result is zero."""
    dtype = torch_dtype(x)
    wide = opmath_dtype(dtype)
    *window, _, outputs = kernel.shape
    x, kernel = jnp.repeat(cast(x, wide), outputs // x.shape[-1], -1), cast(kernel, wide)
    total: Array | None = None
    for place, seen in windows.places(x, window):
        product = seen * kernel[place][0]
        total = product if total is None else total + product
    assert total is not None
    # The sum begins with 0 in torch, else zeros times negative weights would be -0. XLA removes a `0 +`.
    return cast(jnp.where(total == 0, 0, total), dtype)


def _depthwise_forward(x: Array, kernel: Array, windows: ConvolutionWindows) -> tuple[Array, tuple[Array, Array]]:
    return _depthwise(x, kernel, windows), (x, kernel)


def _depthwise_backward(windows: ConvolutionWindows, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = saved
    wide = opmath_dtype(torch_dtype(x))
    *window, _, outputs = kernel.shape
    turned = windows.turned(x.shape[1:-1], grad.shape[1:-1], window)
    grad_x = _depthwise(cast(grad, wide), jnp.flip(cast(kernel, wide), range(len(window))), turned)
    grad_x = grad_x.reshape(*x.shape, outputs // x.shape[-1]).sum(-1)
    repeated = jnp.repeat(cast(x, wide), outputs // x.shape[-1], -1)
    summed = tuple(range(grad.ndim - 1))
    parts = [jnp.sum(seen * cast(grad, wide), summed) for _, seen in windows.places(repeated, window)]
    return cast(grad_x, torch_dtype(x)), cast(jnp.stack(parts).reshape(kernel.shape), torch_dtype(kernel))


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)
