"""Dtypes and strides of results as eager PyTorch's, whatever the decompositions and bodies of an op give.

torch's fake kernels know them. A result is computed in the order of its memory, so that a program gives a channels-last image
as XLA's row-major array, and torch sees a permutation of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaxla.device.view_layout import memory_order
from dynaxla.fx.permutations import invert_permutation, is_dense
from dynaxla.torch_api.pytree import tree_map_only
from dynaxla.torch_api.tracing import pause_tracing, run_fake_kernel

aten = torch.ops.aten

_AS_INPUT = frozenset(
    (
        *(aten.reflection_pad3d.default, aten.replication_pad3d.default, aten.max_unpool2d.default),
        *(aten.channel_shuffle.default, aten.native_channel_shuffle.default),
    )
)
"""Ops whose results on the CPU have the memory format of the input, of which torch's fake kernels know nothing."""

_ROW_MAJOR = frozenset(
    (
        *(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
        aten.nll_loss2d_forward.default,
    )
)
"""Ops whose results on the CPU are row-major, whatever torch's fake kernels say."""


def eager_results(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fake results of a call, with the dtypes and strides of the CPU's kernels; None if torch has no fake kernel."""
    with pause_tracing():
        results = run_fake_kernel(function, args, kwargs)
        if function in _AS_INPUT or function in _ROW_MAJOR:
            memory_format = _memory_format(args[0]) if function in _AS_INPUT else torch.contiguous_format
            return tree_map_only(torch.Tensor, lambda each: each.contiguous(memory_format=memory_format), results)
        return results


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    """The channels-last format of a tensor that is dense in it and not row-major; else the row-major one."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last is None or x.is_contiguous() or not x.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last


def match_results(made: Any, expected: Any) -> Any:
    """Traced results with the dtypes and strides of fake ones; as they are where there is no fake one."""
    if isinstance(made, (list, tuple)):
        return type(made)(map(match_results, made, expected)) if isinstance(expected, (list, tuple)) else made
    if not isinstance(made, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return made
    typed = made if made.dtype is expected.dtype else made.to(expected.dtype)
    return _with_strides(typed, expected)


def _with_strides(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    with pause_tracing():
        if value.shape != expected.shape or not is_dense(expected):
            return value
        memory_format = _memory_format(expected)
        if memory_format is not torch.contiguous_format:  # with the strides of dims of one element, too
            expected = torch.empty_like(expected, memory_format=memory_format)
        if value.stride() == expected.stride():
            return value
        order = memory_order(expected.stride())
    return value.permute(order).contiguous().permute(invert_permutation(order))
