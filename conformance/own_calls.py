"""Calls of the package's own operators, which PyTorch's samples never call, and of attention with extreme masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from dynaxla.custom_ops import internal
from dynaxla.custom_ops.barrier import BARRIER, MATERIALIZE
from dynaxla.custom_ops.constrain import CONSTRAIN, UNSHARD
from dynaxla.custom_ops.max_pool_gradient import MAX_POOL2D_GRADIENT, MAX_POOL3D_GRADIENT
from dynaxla.custom_ops.search_rows import SEARCH_ROWS
from dynaxla.custom_ops.weighted_sums import WEIGHTED_SUMS

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Draw = Callable[..., Tensor]
Arguments = tuple[Any, ...]


def own_calls(wanted: Collection[OpOverload]) -> Iterator[tuple[OpOverload, Arguments]]:
    """Calls of those of the wanted operators that are the package's own, in every float dtype."""
    for target, make in _MAKERS.items():
        for dtype in FLOATS if target in wanted else ():
            generator = torch.Generator().manual_seed(2)

            def draw(*sizes: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> Tensor:
                return torch.randn(sizes, generator=generator).to(dtype)

            yield from ((target, args) for args in make(draw))


def _annotated(text: str) -> Callable[[Draw], Iterator[Arguments]]:
    """Calls of an op that says by a text how its operand is sharded."""
    return lambda draw: ((draw(rows, 3), text) for rows in (1, 2, 4))


def _linear(draw: Draw) -> Iterator[Arguments]:
    for rows, biased in itertools.product((1, 2, 7), (True, False)):
        yield draw(rows, 5), draw(3, 5), draw(3) if biased else None
    yield draw(4, 5), draw(3, 5), draw(4, 3)
    for value in (math.nan, math.inf):
        for rows in (1, 3):
            yield _with(draw(rows, 5), value), _with(draw(3, 5), 0.0), draw(3)
            yield draw(rows, 5), _with(draw(3, 5), value), draw(3)


def _barrier(draw: Draw) -> Iterator[Arguments]:
    for sizes in ((), (3,), (2, 0), (2, 3)):
        yield (draw(*sizes),)
    yield (_with(draw(2, 3), math.nan),)


def _contract_rows(draw: Draw) -> Iterator[Arguments]:
    for rows in ((4,), (2, 5), (1, 1), (3, 1, 2), (2, 0)):
        yield draw(*rows, 3), draw(*rows, 6)
    for value in (math.nan, math.inf):
        yield _with(draw(2, 3, 5), value), _with(draw(2, 3, 4), 0.0)


def _kernel(draw: Draw) -> Iterator[Arguments]:
    for window in ((3,), (1,), (3, 2), (1, 1), (2, 3, 2)):
        yield (draw(4, 2, *window),)


def _convolution(draw: Draw) -> Iterator[Arguments]:
    for dims in (1, 2, 3):
        for window, stride, padding, dilation, groups in (
            (3, 1, 1, 1, 1), (3, 2, 0, 1, 1), (2, 1, 1, 2, 2), (1, 1, 0, 1, 1), (1, 2, 0, 1, 1), (1, 1, 1, 1, 1),
            (3, 1, 1, 1, 4),
        ):  # fmt: skip
            x, kernel = draw(2, *[7] * dims, 4), draw(*[window] * dims, 4 // groups, 8)
            settings = ([stride] * dims, [padding] * dims, [dilation] * dims, groups)
            yield x, kernel, draw(8), *settings
            yield x, kernel, None, *settings
            yield _with(x, math.nan), kernel, draw(8), *settings
            yield _with(x, math.inf), _with(kernel, 0.0), None, *settings


def _attention(draw: Draw) -> Iterator[Arguments]:
    for heads, groups, queries, keys in ((2, 2, 3, 3), (4, 2, 1, 5), (4, 1, 5, 3), (3, 3, 1, 1)):
        operands = draw(2, heads, queries, 4), draw(2, groups, keys, 4), draw(2, groups, keys, 4)
        for mask in (None, *_masks(draw, queries, keys)):
            yield *operands, mask, False, None
            yield *operands, mask, False, 0.3
        yield *operands, None, True, None
    for value in (math.nan, math.inf, -math.inf):
        for place in range(3):
            operands = tuple(_with(draw(1, 2, 3, 4), value) if i == place else draw(1, 2, 3, 4) for i in range(3))
            yield *operands, None, False, None
            yield *operands, None, True, None


def _flash(draw: Draw) -> Iterator[Arguments]:
    for query, key, value, mask, is_causal, scale in _attention(draw):
        if query.shape[1] == key.shape[1]:
            yield query, key, value, 0.0, is_causal, {"attn_mask": mask, "scale": scale}


def _masks(draw: Draw, queries: int, keys: int) -> Iterator[Tensor]:
    """As bools and as numbers; a query that may attend to nothing; and more than that is masked out."""
    allowed = draw(1, 1, queries, keys) > -0.5
    yield allowed
    yield torch.zeros_like(allowed)
    yield draw(2, 1, queries, keys)
    yield draw(1, 1, queries, keys).masked_fill(~allowed, -math.inf)
    nothing = draw(1, 1, queries, keys)
    nothing[..., 0, :] = -math.inf
    yield nothing
    yield torch.full_like(nothing, torch.finfo(nothing.dtype).min)


def _with(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[1] = value
    return changed


def _max_pool(space: int) -> Callable[[Draw], Iterator[Arguments]]:
    """Windows over equal values, over NaN and over nothing but minus infinity; with steps, padding, gaps and a last part."""

    def calls(draw: Draw) -> Iterator[Arguments]:
        for kernel, stride, padding, dilation, ceil_mode in (
            (2, [], 0, 1, False),
            (3, [2] * space, 1, 1, False),
            (3, [2] * space, 1, 1, True),
            (3, [1] * space, 0, 2, False),
        ):
            settings = ([kernel] * space, stride, [padding] * space, [dilation] * space, ceil_mode)
            x = (2 * draw(2, 3, *[7, 8, 9][:space])).round()
            edges = x.clone()
            edges[..., :4] = -math.inf
            for image in (x, _with(x, math.nan), edges, x[0]):
                pooled = nn.functional.max_pool2d if space == 2 else nn.functional.max_pool3d
                yield draw(*pooled(image, kernel, stride or None, padding, dilation, ceil_mode).shape), image, *settings

    return calls


def _weighted_sums(draw: Draw) -> Iterator[Arguments]:
    for rows in ((4,), (2, 3), (2, 0), ()):
        for is_read in (draw(3, 5) > -0.5, torch.zeros(3, 5, dtype=torch.bool)):
            yield draw(*rows, 5), draw(3, 5), is_read
    for value in (math.nan, math.inf):
        yield _with(draw(2, 5), value), draw(3, 5), draw(3, 5) > -0.5


def _search_rows(draw: Draw) -> Iterator[Arguments]:
    for count, right, small in itertools.product((0, 1, 4, 6), (False, True), (False, True)):
        rows = draw(3, 6).sort(1)[0]
        yield rows, draw(3, 5), torch.tensor(count), right, small
        yield rows[0], _with(draw(2, 3), math.nan), torch.tensor(count), right, small
        yield _with(draw(6), math.nan), draw(4), torch.tensor(count), right, small


_MAKERS: dict[OpOverload, Callable[[Draw], Iterator[Arguments]]] = {
    CONSTRAIN: _annotated("data;"),
    UNSHARD: _annotated("data"),
    **dict.fromkeys((BARRIER, MATERIALIZE), _barrier),
    internal.LINEAR: _linear,
    internal.CONTRACT_ROWS: _contract_rows,
    internal.KERNEL: _kernel,
    internal.CONVOLUTION: _convolution,
    MAX_POOL2D_GRADIENT: _max_pool(2),
    MAX_POOL3D_GRADIENT: _max_pool(3),
    WEIGHTED_SUMS: _weighted_sums,
    SEARCH_ROWS: _search_rows,
    internal.ATTENTION: _attention,
    FLASH: _flash,
}
