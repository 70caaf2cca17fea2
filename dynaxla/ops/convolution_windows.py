"""What the windows of a convolution read of its input, along each spatial axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True, slots=True)
class ConvolutionWindows:
    """The window parameters of a convolution, see `convolve`."""

    stride: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...]

    def take(self, axes: slice) -> ConvolutionWindows:
        """The windows along some of the spatial axes."""
        return ConvolutionWindows(self.stride[axes], self.edges[axes], self.dilation[axes], self.spread[axes])

    def dilated_axes(self, x: Array, kernel: Array) -> list[DilatedAxis]:
        each = zip(x.shape[1:-1], self.spread, kernel.shape, self.dilation, self.edges, strict=False)
        return [DilatedAxis(size, step, window, apart, *edges) for size, step, window, apart, edges in each]

    def are_points(self, kernel: Array) -> bool:
        """Whether each place of the result reads one of the input's."""
        sizes = (*kernel.shape[: len(self.spread)], *self.spread)
        return set(sizes) == {1} and not any(itertools.chain(*self.edges))

    def are_patches(self, kernel: Array) -> bool:
        """Whether windows lie side by side: each place of the input is read once at most."""
        return tuple(kernel.shape[:-2]) == self.stride and {*self.spread, *self.dilation} == {1}

    def patches(self, x: Array) -> Array:
        """What each of the windows that lie side by side reads of x [n, *space, c]: [n, *places, *window, c]."""
        x, dims = self.padded(x), len(self.stride)
        counts = [size // step for size, step in zip(x.shape[1:-1], self.stride, strict=True)]
        whole = x[:, *(slice(count * step) for count, step in zip(counts, self.stride, strict=True))]
        split = whole.reshape(len(x), *itertools.chain(*zip(counts, self.stride, strict=True)), x.shape[-1])
        return jnp.transpose(split, (0, *range(1, 2 * dims, 2), *range(2, 2 * dims + 1, 2), 2 * dims + 1))

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


@dataclass(frozen=True, slots=True)
class DilatedAxis:
    """A spatial axis of a dilated input, whose result is made of `step` phases.

    Place `u * step - phase + before` of the result, where the dilated input has `before` zeros in front, reads the input
    at `u + offset` and every `apart` further, by the window's elements `taps`. All phases have the same u, `start` to `stop`.
    """

    size: int
    step: int
    window: int
    dilation: int
    before: int
    after: int

    @property
    def length(self) -> int:
        """The result's."""
        padded = self.before + (self.size - 1) * self.step + 1 + self.after
        return max(padded - self.dilation * (self.window - 1), 0)

    @property
    def start(self) -> int:
        return -(self.before // self.step)

    @property
    def stop(self) -> int:
        return (self.length - 1 - self.before + self.step - 1) // self.step + 1

    @property
    def first(self) -> int:
        """The result's first place, where the phases are side by side from `start` on, the last one first."""
        return self.before + self.start * self.step - (self.step - 1)

    @property
    def apart(self) -> int:
        return self.dilation // math.gcd(self.dilation, self.step)

    def taps(self, phase: int) -> range:
        every = self.step // math.gcd(self.dilation, self.step)
        first = next((tap for tap in range(self.window) if (tap * self.dilation - phase) % self.step == 0), self.window)
        return range(first, self.window, every)

    def edges(self, phase: int) -> tuple[int, int]:
        taps = self.taps(phase)
        offset = (taps.start * self.dilation - phase) // self.step
        return -(self.start + offset), self.stop + offset + (len(taps) - 1) * self.apart - self.size
