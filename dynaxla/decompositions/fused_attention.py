"""Rewrites the fused attention ops of accelerators to the package's own attention op while AOTAutograd traces.

Their other results (random seeds, cumulative lengths, a debug mask) mean nothing without dropout and are returned as
empty tensors of the right shape. With dropout the ops are not rewritten and run in eager, which draws torch's random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType, NotImplementedType

import torch
from torch import Tensor
from torch.types import IntLikeType

from dynaxla.custom_ops import internal
from dynaxla.torch_api.decompositions import get_computation_dtype
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, make_composite_kernel, replace_python_kernels
from dynaxla.torch_api.transforms import is_in_transform
from dynaxla.types import DEVICE_TYPE

aten = torch.ops.aten

Results = tuple[Tensor | IntLikeType | None, ...] | NotImplementedType
LEFT_TO_TORCH: Results = NotImplemented
"""Returned by a decomposition that does not rewrite the call."""


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Results:
    """Does not rewrite the call; only unifies the lengths of its keys and values."""
    _unify_lengths(key, value)
    return LEFT_TO_TORCH


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p or return_debug_mask:
        return LEFT_TO_TORCH
    _unify_lengths(key, value)
    output, logsumexp = internal.ATTENTION(query, key, value, None, is_causal, scale)
    return (output, logsumexp, None, None, query.shape[2], key.shape[2], *_seeds(query), query.new_empty(0))


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p:
        return LEFT_TO_TORCH
    _unify_lengths(key, value)
    output, logsumexp = internal.ATTENTION(query, key, value, attn_bias, is_causal, scale)
    return (output, logsumexp, *_seeds(query))


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p or return_debug_mask:
        return LEFT_TO_TORCH
    _unify_lengths(key, value)
    output, logsumexp = internal.ATTENTION(query, key, value, attn_bias, is_causal, scale)
    return (output, logsumexp, None, None, query.shape[2], key.shape[2], *_seeds(query), query.new_empty(0))


def overrideable_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    return cudnn_attention(query, key, value, attn_bias, True, dropout_p, is_causal, return_debug_mask, scale=scale)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p:
        return LEFT_TO_TORCH
    grads: tuple[Tensor, ...] = internal.ATTENTION_BACKWARD(
        grad_out, query, key, value, None, out, logsumexp, is_causal, scale
    )
    return grads


def efficient_attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p:
        return LEFT_TO_TORCH
    grads = internal.ATTENTION_BACKWARD(grad_out_, query, key, value, attn_bias, out, logsumexp, is_causal, scale)
    if attn_bias is None or not grad_input_mask[3]:
        return (*grads, None)
    return (*grads, _bias_gradient(grad_out_, query, key, value, attn_bias, out, logsumexp, is_causal, scale))


def _bias_gradient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The gradient of the scores, summed to the bias' shape: P * (dP - rowsum(dO * O)), the derivative of a softmax's product.

    Shapes: query, out, grad_out [..., l, d], key, value [..., s, d], logsumexp [..., l].
    """
    dtype = get_computation_dtype(query.dtype)
    query, key, value, out, grad_out = (x.to(dtype) for x in (query, key, value, out, grad_out))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * factor + attn_bias.to(dtype)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    if is_causal:
        weights = weights.tril()
    weights = weights.masked_fill((logsumexp == -torch.inf).unsqueeze(-1), 0)
    grad = weights * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return grad.sum_to_size(attn_bias.shape).to(attn_bias.dtype)


def cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Results:
    if dropout_p:
        return LEFT_TO_TORCH
    grads: tuple[Tensor, ...] = internal.ATTENTION_BACKWARD(
        grad_out, query, key, value, attn_bias, out, logsumexp, is_causal, scale
    )
    return grads


def _unify_lengths(key: Tensor, value: Tensor) -> None:
    """Guards that keys and values have the same length, so that it is one symbol; Dynamo has two, since torch's fake
    kernels do not compare them."""
    bool(key.size(-2) == value.size(-2))


def _seeds(query: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(2, dtype=torch.int64), query.new_empty((), dtype=torch.int64)


def attend_on_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`. On a device of a package's, torch makes it of products and a softmax: only a kernel in
    C++ can tell it that attention is one op there. The op of the CPU has a body for every device."""
    given = query, key, value, attn_mask, dropout_p, is_causal
    if enable_gqa and query.dim() == key.dim() == value.dim() == 4:
        key, value = (_repeat_heads(each, query.shape[1] // max(each.shape[1], 1)) for each in (key, value))
    shapes = [tuple(each.shape) for each in (query, key, value)]
    is_one_op = (
        query.device.type == DEVICE_TYPE
        and len(shapes[0]) == 4
        and shapes[1] == shapes[2] == (*shapes[0][:2], key.shape[-2], shapes[0][-1])
        and query.is_floating_point()
        and not dropout_p
        and not (attn_mask is not None and attn_mask.requires_grad)
        and not is_in_transform()  # the op has no batching rule, and no derivative but one
    )
    if not is_one_op:
        take_apart = make_composite_kernel(aten.scaled_dot_product_attention.default)
        return take_apart(*given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    return _attend_at_once(query, key, value, attn_mask, is_causal, scale)


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """[b, g, n, e] -> [b, g * times, n, e], each head `times` in a row, as `passes/grouped_query_attention.py` reads it."""
    batch, groups, *rest = x.shape
    return x[:, :, None].expand(batch, groups, times, *rest).reshape(batch, groups * times, *rest)


def replace_attention() -> AbstractContextManager[None]:
    """Context in which `attend_on_device` replaces torch's attention, which is restored at the end."""
    return replace_python_kernels(
        {aten.scaled_dot_product_attention.default: dict.fromkeys((COMPOSITE, AUTOGRAD), attend_on_device)}
    )


ATTENTION_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Results]] = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention.default: flash_attention,
        aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
        aten._scaled_dot_product_efficient_attention.default: efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_attention_backward,
        aten._scaled_dot_product_fused_attention_overrideable.default: overrideable_attention,
    }
)

CHECKED_ATTENTION: Mapping[OpOverload, Callable[..., Results]] = MappingProxyType(
    {aten._scaled_dot_product_flash_attention_for_cpu.default: cpu_attention}
)
