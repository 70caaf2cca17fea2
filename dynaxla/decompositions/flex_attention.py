"""`torch.nn.attention.flex_attention` while AOTAutograd traces: ops of the graph, not a call that keeps its functions.

The blocks of a mask say where its function may hold, for kernels that leave the others out; the function alone defines the
result. A score that stays as it is makes the call `scaled_dot_product_attention` with the function's mask, which has kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from dynaxla.decompositions.eager_strides import set_dim_order
from dynaxla.torch_api.decompositions import get_computation_dtype
from dynaxla.torch_api.flex import FLEX_ATTENTION, map_over_scores
from dynaxla.torch_api.python_kernels import AUTOGRAD, replace_python_kernels
from dynaxla.torch_api.symbols import example

_Function = Callable[..., Tensor]


def replace_flex_attention() -> AbstractContextManager[None]:
    """Context in which calls are made of other ops."""
    return replace_python_kernels({FLEX_ATTENTION: {AUTOGRAD: _flex_attention}})


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: _Function,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: object,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output [batch, heads, queries, size], and each query's logsumexp and largest score, divided by ln 2.

    Args:
        query: [batch, heads, queries, size].
        key: [batch or 1, groups of heads, keys, size].
        value: like `key`, of a size of its own.
        score_mod: gives a score anew, from a score, its batch, head, query and key, and `score_buffers`.
        block_mask: the last element says whether a query attends to a key, from the batch, head, query and key, and
            `mask_buffers`.
        scale: factor of the scores.
        kernel_options: of torch's kernels; ignored.
    """
    del kernel_options
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    places = [torch.arange(size, device=query.device) for size in sizes]
    mask_mod = block_mask[-1]
    mask = None if _holds_always(mask_mod) else map_over_scores(mask_mod, None, places, mask_buffers)
    groups = query.shape[1] // key.shape[1]
    wide = get_computation_dtype(query.dtype)
    all_keys, all_values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    scores = query.to(wide) @ all_keys.to(wide).mT * scale
    if not _is_identity(score_mod):
        scores = map_over_scores(score_mod, scores, places, score_buffers).to(wide)
    weights, logsumexp, largest = _normalize(scores if mask is None else scores.masked_fill(~mask, -math.inf))
    if _is_identity(score_mod):
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
    else:
        output = weights.to(query.dtype) @ all_values.to(query.dtype)
    return _order_like(query, output), logsumexp / math.log(2), largest / math.log(2)


def _normalize(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of scores over the last dim, their logsumexp and the largest. Where all are -inf, the weights are zero, and
    so is every gradient."""
    largest = scores.detach().amax(-1)
    is_empty = largest == -math.inf
    known = scores.masked_fill(is_empty.unsqueeze(-1), 0)
    weights = known.softmax(-1).masked_fill(is_empty.unsqueeze(-1), 0)
    return weights, known.logsumexp(-1).masked_fill(is_empty, -math.inf), largest


def _order_like(query: Tensor, output: Tensor) -> Tensor:
    """The output with its dims in memory in the order of the query's, but the last one innermost, as torch's op has it."""
    *strides, _ = map(example, query.stride())
    return output.contiguous() if None in strides else set_dim_order(output.contiguous(), (*strides, 0))


def _is_identity(score_mod: _Function) -> bool:
    return _result_of(score_mod) in list(_placeholders(score_mod))[:1]


def _holds_always(mask_mod: _Function) -> bool:
    """Whether a mask is torch's own for calls without one: a new tensor of ones."""
    result = _result_of(mask_mod)
    return isinstance(result, Node) and result.op == "call_method" and result.target == "new_ones"


def _placeholders(function: _Function) -> list[Node]:
    return list(function.graph.find_nodes(op="placeholder")) if isinstance(function, GraphModule) else []


def _result_of(function: _Function) -> Any:
    """What a captured function returns, as a node; None for other functions."""
    return function.graph.output_node().args[0] if isinstance(function, GraphModule) else None
