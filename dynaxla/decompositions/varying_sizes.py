"""Ops that are made of others where a size or a number varies, as these have pad rules or take any number.

Where nothing varies the op stays whole: its body is the shorter program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from dynaxla.torch_api.decompositions import Decomposition, decompositions_of, suggest_memory_format
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.torch_api.symbols import varies

aten = torch.ops.aten


@cache
def decompositions_of_varying_sizes() -> Mapping[OpOverload, Decomposition]:
    """Returns them by op; each leaves a call to the op in which nothing varies."""
    of_sizes = {**decompositions_of((aten.block_diag, aten.col2im, aten.narrow_copy)), **_OWN}
    of_numbers = {**decompositions_of(_WITH_NUMBERS), **_OWN_OF_NUMBERS}
    return MappingProxyType(
        {
            **{op: _if_varied(rewrite, (Tensor, *_NUMBERS)) for op, rewrite in of_sizes.items()},
            **{op: _if_varied(rewrite, _NUMBERS) for op, rewrite in of_numbers.items()},
        }
    )


_NUMBERS = (torch.SymInt, torch.SymFloat)
_WITH_NUMBERS = (
    *(aten.celu, aten.elu, aten.elu_backward, aten.hardtanh, aten.hardtanh_backward),
    *(aten.leaky_relu, aten.leaky_relu_backward, aten.softplus, aten.softplus_backward),
    *(aten.threshold, aten.threshold_backward, aten.addcmul, aten.addcdiv),
)
"""Ops with a number that their pad rules take for a constant, such as a slope that changes from call to call."""


def _if_varied(rewrite: Decomposition, kinds: tuple[type, ...]) -> Decomposition:
    """The decomposition of calls with an argument of these kinds that varies."""

    def decompose(*arguments: Any, **options: Any) -> Any:
        if not any(isinstance(value, kinds) and varies(value) for value in tree_leaves((arguments, options))):
            return NotImplemented
        return rewrite(*arguments, **options)

    return decompose


def _addr(x: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    """Each product and the sum are rounded, as in eager; x is not read if beta is 0."""
    if len({x.dtype, vec1.dtype, vec2.dtype}) > 1 or x.dtype is torch.bool:
        return NotImplemented
    outer = (vec1 * alpha).unsqueeze(1) * vec2
    return outer if beta == 0 else x * beta + outer


def _addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    """One product over the batches and the inner dim."""
    if x.dtype.itemsize < 4 or x.dim() < 2 or varies(alpha) or alpha == 0:
        return NotImplemented
    left = batch1.transpose(0, 1).reshape(batch1.shape[1], -1)
    right = batch2.reshape(-1, batch2.shape[2])
    return torch.addmm(x, left, right, beta=beta, alpha=alpha)


def _scaled_product(
    multiply: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    """addmm and others with a beta that varies. The product is first in the sum, as the result is row-major like it.

    NaN in x counts for nothing where beta is 0. Whether NaN in the product does where alpha is depends on eager's library.
    """
    if x.dtype.itemsize < 4 or varies(alpha) or alpha == 0:
        return NotImplemented
    is_read = torch.scalar_tensor(beta, dtype=torch.float64, device=x.device) != 0
    return multiply(left, right) * alpha + torch.where(is_read, x * beta, 0)


def _lerp(x: Tensor, end: Tensor, weight: Number) -> Any:
    if x.dtype.itemsize < 4:
        return NotImplemented  # whose weight is not rounded to 16 bits
    return torch.lerp(x, end, torch.scalar_tensor(weight, dtype=x.dtype, device=x.device))


def _dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)  # type: ignore[no-any-return]


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.reshape(-1)[index]


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
    if not x.is_contiguous():
        return NotImplemented  # whose result has the strides of x
    written = x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return written.view(x.shape)


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value (the smallest of several) and its last index: the end of the longest run of a sorted row."""
    if x.dim() == 0:
        return NotImplemented
    values, places = x.sort(stable=True, dim=dim)
    steps = torch.arange(x.shape[dim], device=x.device)
    steps = steps.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]).expand(x.shape)
    starts = torch.where(values != values.roll(1, dim), steps, 0)
    longest = (steps - starts.cummax(dim)[0]).argmax(dim, keepdim=True)
    found = values.gather(dim, longest), places.gather(dim, longest)
    return found if keepdim else tuple(each.squeeze(dim) for each in found)


def _global_max(rank: int, x: Tensor, output_size: list[int]) -> Any:
    """adaptive_max_pool of images of `rank` dims to one pixel: the largest element and its index in the image, which is that of
    the first of equal elements, of the last NaN."""
    if any(not isinstance(n, int) or n != 1 for n in output_size) or not _gives_row_major(x):
        return NotImplemented
    shape = [*x.shape[:-rank], *[1] * rank]
    row = x.flatten(-rank)
    values, places = row.max(-1)
    last_nan = torch.where(row.isnan(), torch.arange(row.shape[-1], device=x.device), 0).amax(-1)
    return values.view(shape), torch.where(values.isnan(), last_nan, places).view(shape)


def _adaptive_max_backward(rank: int, grad: Tensor, x: Tensor, indices: Tensor) -> Any:
    """The gradient of a window goes to the element at its index in the image, of `rank` dims."""
    if not _gives_row_major(x):
        return NotImplemented
    gradients, places = grad.flatten(-rank), indices.flatten(-rank)
    return x.new_zeros(x.shape).flatten(-rank).scatter_add(-1, places, gradients).view(x.shape)


def _gives_row_major(x: Tensor) -> bool:
    """Whether results of eager's pools have the strides of a new tensor."""
    return suggest_memory_format(x) is torch.contiguous_format


def _search_number(rows: Tensor, number: Number, *, sorter: Tensor | None = None, **options: Any) -> Any:
    """searchsorted for a number: a 0-d result."""
    wanted = torch.scalar_tensor(number, dtype=rows.dtype, device=rows.device)
    if sorter is not None or not _fits(number, rows.dtype):
        return NotImplemented
    return aten.searchsorted.Tensor(rows, wanted, **options)


def _place_number(number: Number, boundaries: Tensor, **options: Any) -> Any:
    """bucketize of a number: a 0-d result."""
    return _search_number(boundaries, number, **options)


def _fits(number: Number, dtype: torch.dtype) -> bool:
    """Whether a number of Python has the kind of the dtype: a row of integers is searched for 1.5 as it is."""
    return dtype.is_floating_point or (isinstance(number, int) and not dtype.is_complex)


_OWN: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        aten.addr.default: _addr,
        aten.addbmm.default: _addbmm,
        aten.dist.default: _dist,
        aten.take.default: _take,
        aten.put.default: _put,
        aten.mode.default: _mode,
        aten.adaptive_max_pool2d.default: partial(_global_max, 2),
        aten.adaptive_max_pool3d.default: partial(_global_max, 3),
        aten.adaptive_max_pool2d_backward.default: partial(_adaptive_max_backward, 2),
        aten.adaptive_max_pool3d_backward.default: partial(_adaptive_max_backward, 3),
        aten.searchsorted.Scalar: _search_number,
        aten.bucketize.Scalar: _place_number,
    }
)

_OWN_OF_NUMBERS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        aten.addmm.default: partial(_scaled_product, torch.mm),
        aten.addmv.default: partial(_scaled_product, torch.mv),
        aten.baddbmm.default: partial(_scaled_product, torch.bmm),
        aten.lerp.Scalar: _lerp,
    }
)
