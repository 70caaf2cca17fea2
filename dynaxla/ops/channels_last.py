"""Convolutions with channels last; on the CPU, depthwise ones are sums of products, 1x1 ones matrix products, those of volumes
sums of convolutions of planes, and those of groups one of these or a convolution of each group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynaxla.ops.convolution_windows import ConvolutionWindows, DilatedAxis
from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype

MAX_WINDOW_ELEMENTS = 128
"""Depthwise windows with more elements than this are left to XLA, as each element adds three operations to compile."""

MAX_COLUMN_WINDOW = 32
"""A window of more elements is left to XLA: columns of 64 x 1 take longer to gather than the convolution."""

MAX_GROUP_WINDOW = 36
"""Groups whose windows have more elements, of all the group's channels, are not computed as depthwise convolutions."""

MAX_CONVOLUTIONS = 64
"""More groups than this are not convolutions of their own: each takes 30 ms to compile."""

MAX_STACKED_PLACES = 256
"""Groups whose channels have at most this many elements are products of columns, which take a third of the time to compile."""

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
    to all. XLA's 1x1 convolution takes up to twice as long there as the equal matrix product, that of groups 3 to 20 times as
    long as eager's, and its gradient of the weight 100 to 600 times.

    Args:
        edges: zero padding before and after each spatial axis; negative values crop.
        spread: the input's dilation along the spatial axes, for transposed convolutions.
    """
    dims = x.ndim - 2
    windows = ConvolutionWindows(tuple(stride), tuple(edges), tuple(dilation), tuple(spread or [1] * dims))

    def whole(x: Array, kernel: Array) -> Array:
        space = "DHW"[3 - dims :]
        layout = (f"N{space}C", f"{space}IO", f"N{space}C")
        spread, dilation = windows.spread, windows.dilation
        return lax.conv_general_dilated(x, kernel, stride, edges, spread, dilation, layout, groups, precision=precision)

    on_cpu = _choose_on_cpu(whole, x, kernel, groups, windows, precision)
    if on_cpu is whole:
        return whole(x, kernel)
    result: Array = lax.platform_dependent(x, kernel, cpu=on_cpu, default=whole)
    return result


def _choose_on_cpu(
    whole: Callable[..., Array],
    x: Array,
    kernel: Array,
    groups: int,
    windows: ConvolutionWindows,
    precision: lax.Precision | None,
) -> Callable[[Array, Array], Array]:
    """How the CPU computes a convolution of x and kernel: `whole`, which is XLA's own, or as something else."""
    if 0 in kernel.shape[-2:]:  # the others divide by the number of channels
        return whole
    if set(windows.stride) == {1} != set(windows.spread):
        return partial(_convolve_phases, groups=groups, windows=windows, precision=precision)
    if groups == 1 and windows.are_points(kernel):
        return partial(_product, stride=windows.stride, precision=precision)
    if groups == 1 and windows.are_patches(kernel):
        return partial(_multiply_patches, windows=windows, precision=precision)
    if groups == 1 and len(windows.stride) == 3 and windows.spread[0] == 1:
        return partial(_convolve_planes, windows=windows, precision=precision)
    places = math.prod(jax.eval_shape(whole, x, kernel).shape[:-1])
    if groups == 1:
        is_larger = places > math.prod(x.shape[:-1]) and set(windows.spread) == {1}
        return partial(_convolve_padded, windows=windows, precision=precision) if is_larger else whole
    if _is_by_channels(kernel, windows):
        return partial(_convolve_channels, windows=windows)
    if places > MAX_STACKED_PLACES and groups <= MAX_CONVOLUTIONS:
        return partial(_convolve_groups, groups=groups, windows=windows, precision=precision)
    if math.prod(kernel.shape[:-2]) <= MAX_COLUMN_WINDOW:
        return partial(_multiply_groups, groups=groups, windows=windows, precision=precision)
    return whole


def _is_by_channels(kernel: Array, windows: ConvolutionWindows) -> bool:
    """Whether a convolution of groups is a sum of depthwise ones: those of few elements in the window, or of one channel.

    Not one of a dilated input, whose zeros would be factors of a gradient's NaN.
    """
    *window, inputs, _ = kernel.shape
    if inputs == 1:
        return math.prod(window) <= MAX_WINDOW_ELEMENTS
    return math.prod(window) * inputs <= MAX_GROUP_WINDOW and set(windows.spread) == {1}


def convolve_by_columns(
    x: Array, weight: Array, windows: ConvolutionWindows, precision: lax.Precision | None = None
) -> Array:
    """The convolution of x [n, *space, c] with weight [o, c, *window], torch's layout, as one matrix product.

    A row of the product's first matrix, [places, c * window], has what one window sees. Neither the product nor its gradients
    permute the weight.
    """
    outputs, _, *window = weight.shape
    seen = jnp.stack([each for _, each in windows.places(x, window)], -2)
    columns = jnp.swapaxes(seen, -1, -2).reshape(math.prod(seen.shape[:-2]), math.prod(weight.shape[1:]))
    contract = (((1,), (1,)), ((), ()))
    product: Array = lax.dot_general(columns, weight.reshape(outputs, columns.shape[1]), contract, precision=precision)
    return product.reshape(*seen.shape[:-2], outputs)


def has_small_columns(
    places: int, weight: Sequence[int], padding: Sequence[int], groups: int, *, is_permuted: bool
) -> bool:
    """Whether XLA's CPU is faster by `convolve_by_columns`.

    A convolution there reads the weight permuted, and its gradients permute it twice more: for 512 channels and 7 x 7 places
    that takes as long as the products. Columns are a matrix of [places, c * window] beside the weight's [o, c * window].

    Args:
        places: how many elements of an output channel there are, in the whole batch.
        weight: its shape [o, c/groups, *window].
        padding: along each spatial axis.
        is_permuted: whether a permuted copy of the weight lasts for many calls. Then columns pay for a quarter of the places.
    """
    window = math.prod(weight[2:])
    if groups != 1 or window > MAX_COLUMN_WINDOW:
        return False
    if window == 1 and not any(padding):
        return not is_permuted
    return places * (4 if is_permuted else 1) <= weight[0]


def _convolve(
    x: Array, kernel: Array, windows: ConvolutionWindows, precision: lax.Precision | None, groups: int = 1
) -> Array:
    return convolve(x, kernel, windows.stride, windows.edges, windows.dilation, groups, windows.spread, precision)


def _convolve_channels(x: Array, kernel: Array, windows: ConvolutionWindows) -> Array:
    """A convolution of groups as a sum of depthwise ones: of the first channel of each group, of the second, and so on."""
    inputs = kernel.shape[-2]
    if inputs == 1:
        return _depthwise(x, kernel, windows)
    channels = x.reshape(*x.shape[:-1], x.shape[-1] // inputs, inputs)
    each = (_depthwise(channels[..., i], kernel[..., i : i + 1, :], windows) for i in range(inputs))
    return reduce(jnp.add, each)


def _convolve_groups(
    x: Array, kernel: Array, groups: int, windows: ConvolutionWindows, precision: lax.Precision | None
) -> Array:
    """A convolution of each group, side by side."""
    pairs = zip(jnp.split(x, groups, -1), jnp.split(kernel, groups, -1), strict=True)
    return jnp.concatenate([_convolve(*pair, windows, precision) for pair in pairs], -1)


def _convolve_planes(x: Array, kernel: Array, windows: ConvolutionWindows, precision: lax.Precision | None) -> Array:
    """A convolution of volumes as a sum, over the window's planes, of convolutions of the planes that each of them sees."""
    wide = opmath_dtype(torch_dtype(x))
    along, across = windows.take(slice(1)), windows.take(slice(1, None))

    def convolve_planes(x: Array, kernel: Array) -> Array:
        planes = _convolve(lax.collapse(x, 0, 2), kernel, across, precision)
        return planes.reshape(*x.shape[:2], *planes.shape[1:])

    seen = along.places(cast(x, wide).reshape(*x.shape[:2], math.prod(x.shape[2:])), kernel.shape[:1])
    planes = (each.reshape(*each.shape[:2], *x.shape[2:]) for _, each in seen)
    parts = map(convolve_planes, planes, cast(kernel, wide))
    return cast(reduce(jnp.add, parts), torch_dtype(x))


def _convolve_phases(
    x: Array, kernel: Array, groups: int, windows: ConvolutionWindows, precision: lax.Precision | None
) -> Array:
    """A convolution of a dilated input: one of the input itself for each phase of the result's places, side by side.

    XLA's own multiplies zeros, and its gradient of the weight takes 10 to 30 times as long. Where all phases read alike, they
    are outputs of one convolution.
    """
    axes = windows.dilated_axes(x, kernel)
    ones, steps = (1,) * len(axes), [axis.step for axis in axes]

    def convolve_phase(phases: Sequence[int], kernel: Array) -> Array:
        edges = tuple(axis.edges(phase) for axis, phase in zip(axes, phases, strict=True))
        phase_windows = ConvolutionWindows(ones, edges, tuple(axis.apart for axis in axes), ones)
        return _convolve(x, kernel, phase_windows, precision, groups)

    if all(axis.dilation == 1 and axis.window % axis.step == 0 for axis in axes):
        result = convolve_phase([0] * len(axes), _merge_phases(kernel, steps))
    else:
        size = (len(x), *(axis.stop - axis.start for axis in axes), kernel.shape[-1])
        parts = []
        for phases in itertools.product(*map(range, steps)):
            taps = [axis.taps(phase) for axis, phase in zip(axes, phases, strict=True)]
            read = kernel[*(slice(each.start, each.stop, each.step) for each in taps)]
            parts.append(convolve_phase(phases, read) if all(taps) else jnp.zeros(size, x.dtype))
        result = jnp.stack(parts, -1)
    return _interleave(result.reshape(*result.shape[: len(axes) + 1], kernel.shape[-1], *steps), axes)


def _merge_phases(kernel: Array, steps: Sequence[int]) -> Array:
    """A kernel [*window, c, o] whose phases are outputs: [*window / steps, c, o * phases]."""
    *window, inputs, outputs = kernel.shape
    dims, fewer = len(steps), [size // step for size, step in zip(window, steps, strict=True)]
    split = kernel.reshape(*itertools.chain(*zip(fewer, steps, strict=True)), inputs, outputs)
    order = [*range(0, 2 * dims, 2), 2 * dims, 2 * dims + 1, *range(1, 2 * dims, 2)]
    return jnp.transpose(split, order).reshape(*fewer, inputs, outputs * math.prod(steps))


def _interleave(phases: Array, axes: Sequence[DilatedAxis]) -> Array:
    """Puts phases [n, *space, outputs, *steps] where they belong: [n, *lengths, outputs]."""
    dims = len(axes)
    backwards = jnp.flip(phases, range(dims + 2, 2 * dims + 2))
    order = [0, *itertools.chain(*((1 + dim, dims + 2 + dim) for dim in range(dims))), dims + 1]
    sizes = [size * axis.step for size, axis in zip(phases.shape[1:], axes, strict=False)]
    placed = jnp.transpose(backwards, order).reshape(len(phases), *sizes, phases.shape[dims + 1])
    return placed[:, *(slice(-axis.first, axis.length - axis.first) for axis in axes)]


def _convolve_padded(x: Array, kernel: Array, windows: ConvolutionWindows, precision: lax.Precision | None) -> Array:
    """A convolution whose input is padded before: XLA takes the gradient's image for its window, 20 times as slow, where the
    result is larger than the input."""
    padded = replace(windows, edges=((0, 0),) * len(windows.edges))
    return _convolve(lax.optimization_barrier(windows.padded(x)), kernel, padded, precision)


def _multiply_groups(
    x: Array, kernel: Array, groups: int, windows: ConvolutionWindows, precision: lax.Precision | None
) -> Array:
    """A convolution of groups as a stack of products, one for each group: what each window sees, by the group's kernel."""
    *window, inputs, outputs = kernel.shape
    stack = jnp.moveaxis(x.reshape(*x.shape[:-1], groups, inputs), -2, 0)
    seen = jnp.stack([each for _, each in windows.places(lax.collapse(stack, 0, 2), window)], -2)
    columns = seen.reshape(groups, len(x) * math.prod(seen.shape[1:-2]), math.prod(window) * inputs)
    kernels = kernel.reshape(columns.shape[-1], groups, outputs // groups)
    product = lax.dot_general(columns, kernels, (((2,), (0,)), ((0,), (1,))), precision=precision)
    return jnp.moveaxis(product, 0, 1).reshape(len(x), *seen.shape[1:-2], outputs)


def _product(x: Array, kernel: Array, stride: Sequence[int], precision: lax.Precision | None) -> Array:
    x = x[:, *(slice(None, None, step) for step in stride)]
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    contract = (((1,), (0,)), ((), ()))
    product: Array = lax.dot_general(rows, kernel.reshape(kernel.shape[-2:]), contract, precision=precision)
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def _multiply_patches(x: Array, kernel: Array, windows: ConvolutionWindows, precision: lax.Precision | None) -> Array:
    """A convolution whose windows lie side by side, as a product of patches by the kernel."""
    patches, depth = windows.patches(x), math.prod(kernel.shape[:-1])
    contract = (((1,), (0,)), ((), ()))
    product: Array = lax.dot_general(
        patches.reshape(math.prod(patches.shape[: x.ndim - 1]), depth),
        kernel.reshape(depth, kernel.shape[-1]),
        contract,
        precision=precision,
    )
    return product.reshape(*patches.shape[: x.ndim - 1], kernel.shape[-1])


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
