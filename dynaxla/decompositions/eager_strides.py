"""Ops of the op table whose results have other strides in eager than torch's fake kernels predict.

Where the two differ, the call becomes one of row-major operands, for which they are equal, and its result is put in eager's
order of dims. Other calls of the same ops stay as they are. Sizes that vary count as they are in the call being captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dynaxla.fx.permutations import invert_permutation
from dynaxla.torch_api.decompositions import Decomposition, is_native_convolution, suggest_memory_format
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only
from dynaxla.torch_api.symbols import example
from dynaxla.torch_api.tracing import pause_tracing

aten = torch.ops.aten
_CONVOLUTION_BACKWARD = aten.convolution_backward.default

Strides = tuple[int, ...]
Rule = Callable[..., Strides]
"""From the result's sizes and the call's arguments, with meta tensors for tensors, to the strides of the result in eager."""


def _order_by_operands(shape: Sequence[int], *arguments: Any) -> Strides:
    """The order of dims that torch's iterator over elements chooses, by its own kernels, for up to three tensors."""
    del shape
    operands = [x for x in arguments if isinstance(x, Tensor)]
    kernel = (torch.neg, torch.add, torch.addcmul)[len(operands) - 1]
    return kernel(*operands).stride()  # type: ignore[no-any-return, operator]


def _order_of_ldexp(shape: Sequence[int], x: Tensor, other: Tensor) -> Strides:
    return _order_by_operands(shape, x, other.contiguous())  # x * 2 ** other; a power of a number is row-major


def _order_of_angle(shape: Sequence[int], x: Tensor) -> Strides:
    return _row_major(shape) if x.is_complex() else _order_by_operands(shape, x)


def _row_major(shape: Sequence[int], *_: Any) -> Strides:
    return torch.empty(shape, device="meta").stride()


def _format_of(place: int) -> Rule:
    """The memory format of an argument."""

    def strides(shape: Sequence[int], *arguments: Any) -> Strides:
        return torch.empty(shape, device="meta", memory_format=memory_format_of(arguments[place])).stride()

    return strides


def _format_if_rolled_along_dims(
    shape: Sequence[int], x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Strides:
    return _format_of(0)(shape, x) if dims else _row_major(shape)


def _format_of_volume(shape: Sequence[int], x: Tensor, *_: Any) -> Strides:
    """The memory format of images of three dims; of one image, that of a batch of it."""
    if x.dim() == 5:
        return _format_of(0)(shape, x)
    is_last = x.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
    memory_format = torch.channels_last_3d if is_last else torch.contiguous_format
    return torch.empty([1, *shape], device="meta", memory_format=memory_format).stride()[1:]


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The format that torch gives results like x: channels last if the strides have that order, with gaps too, and are not
    row-major."""
    return torch.contiguous_format if x.is_contiguous() else suggest_memory_format(x)


_RULES: Mapping[OpOverload, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor),
                *(aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.heaviside.default),
                *(aten.logaddexp.default, aten.logaddexp2.default, aten.logical_and.default, aten.logical_or.default),
                *(aten.logical_xor.default, aten.logit_backward.default, aten.native_dropout_backward.default),
                *(aten.special_xlog1py.default, aten.xlogy.Tensor),
            ),
            _order_by_operands,
        ),
        aten.ldexp.Tensor: _order_of_ldexp,
        aten.angle.default: _order_of_angle,
        aten.max_pool3d_with_indices.default: _format_of_volume,
        aten.roll.default: _format_if_rolled_along_dims,
        **dict.fromkeys(
            (
                *(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
                *(aten.nll_loss2d_forward.default, aten.pow.Scalar, aten.log_sigmoid_forward.default),
            ),
            _row_major,
        ),
        **dict.fromkeys(
            (
                *(aten.reflection_pad3d.default, aten.replication_pad3d.default, aten.max_unpool2d.default),
                *(aten.channel_shuffle.default, aten.native_channel_shuffle.default),
                *(aten._batch_norm_no_update.default, aten._batch_norm_with_update_functional.default),
                aten._native_batch_norm_legit.no_stats,
                aten._native_batch_norm_legit_no_training.default,
                aten._native_batch_norm_legit_functional.default,
            ),
            _format_of(0),
        ),
        **dict.fromkeys(
            (
                *(aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default),
                *(aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default),
            ),
            _format_of(1),
        ),
    }
)
"""By op, the strides of its first result, and of others of the same sizes."""


def eager_strides(op: Any, predicted: Any, arguments: Sequence[Any]) -> Strides | None:
    """The strides on the CPU of an op's first result; None where they are as predicted, or not known.

    Args:
        predicted: the fake results.
        arguments: of the call, with fake tensors.
    """
    rule, first = _RULES.get(op), predicted[0] if isinstance(predicted, (list, tuple)) else predicted
    if rule is None or first.is_cuda:
        return None
    shape = tuple(map(example, first.shape))
    metas = tree_map_only(Tensor, _meta, list(arguments))
    known = [x for x in tree_leaves(metas) if isinstance(x, Tensor)]
    if None in shape or len(known) < sum(isinstance(x, Tensor) for x in tree_leaves(list(arguments))):
        return None
    strides = rule(shape, *metas)
    given = map(example, first.stride())
    is_predicted = all(size == 1 or mine == own for size, mine, own in zip(shape, given, strides, strict=True))
    return None if is_predicted or 0 in shape else strides


def _meta(tensor: Tensor) -> Tensor | None:
    """A meta tensor of floats with the tensor's sizes and strides; None if the capture does not know them."""
    sizes, strides = tuple(map(example, tensor.shape)), tuple(map(example, tensor.stride()))
    if None in (*sizes, *strides):
        return None
    return torch.empty_strided(
        sizes, strides, dtype=torch.cfloat if tensor.is_complex() else torch.float32, device="meta"
    )


def keep_eager_strides(op: OpOverload, otherwise: Decomposition | None, *arguments: Any, **named: Any) -> Any:
    """Decomposes a call whose strides in eager are not those that torch predicts; other calls as another decomposition does."""
    strides: Strides | None = None
    if not all(map(_is_row_major, tree_leaves(list(arguments)))):
        with pause_tracing():
            predicted = op(*arguments, **named)
        strides = eager_strides(op, predicted, arguments)
    if strides is None:
        return NotImplemented if otherwise is None else otherwise(*arguments, **named)
    row_major = tree_map_only(Tensor, lambda x: x.contiguous(), list(arguments))
    results = op(*row_major, **named)
    if isinstance(results, Tensor):
        return set_dim_order(results, strides)
    sizes = results[0].shape
    return tuple(set_dim_order(each, strides) if each.shape == sizes else each for each in results)


def keep_weight_gradient(otherwise: Decomposition | None, *arguments: Any) -> Any:
    """Decomposes the gradients of a convolution, of which the weight's has dims of one element and is row-major by kernels of
    torch's own, while torch predicts the strides of channels last, which mean the same: (3, 1, 3, 3) of 8 x 3 x 1 x 1."""
    gradient, x, weight, *settings, mask = arguments
    if not mask[1] or _is_row_major(x) or not _is_native(x, weight, settings):
        return NotImplemented if otherwise is None else otherwise(*arguments)
    with pause_tracing():
        first, second, _ = _CONVOLUTION_BACKWARD(*arguments)
    if not _is_row_major(second):
        return NotImplemented if otherwise is None else otherwise(*arguments)
    results = _CONVOLUTION_BACKWARD(*(each.contiguous() for each in (gradient, x, weight)), *settings, mask)
    return (set_dim_order(results[0], tuple(map(example, first.stride()))) if mask[0] else None), *results[1:]


def _is_native(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    with pause_tracing():
        made = [_meta(each) for each in (x, weight)]
        if x.is_cuda or None in made:
            return False
        plain = [torch.empty_strided(e.shape, e.stride(), dtype=x.dtype, device="cpu") for e in made if e is not None]
        return is_native_convolution(*plain, *tree_map_only(torch.SymInt, example, list(settings)))


def stride_decompositions(others: Mapping[OpOverload, Decomposition]) -> Mapping[OpOverload, Decomposition]:
    """The decompositions of these ops, above the other decompositions of the same ops."""
    kept = {op: partial(keep_eager_strides, op, others.get(op)) for op in _RULES}
    return {**kept, _CONVOLUTION_BACKWARD: partial(keep_weight_gradient, others.get(_CONVOLUTION_BACKWARD))}


def _is_row_major(value: Any) -> bool:
    """Whether a value is no tensor, or one known to be row-major, for which torch predicts eager's strides."""
    if not isinstance(value, Tensor):
        return True
    expected = 1
    for size, stride in zip(map(example, reversed(value.shape)), map(example, reversed(value.stride())), strict=True):
        if size is None or (stride != expected and size != 1):
            return False
        expected *= size
    return True


def set_dim_order(x: Tensor, strides: Strides) -> Tensor:
    """A dense tensor with the elements of x, and its dims in memory in the order of the strides."""
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    return x.permute(order).contiguous().permute(invert_permutation(order)) if order != sorted(order) else x
