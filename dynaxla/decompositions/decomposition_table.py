"""The table of ATen ops that are decomposed while AOTAutograd traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.types import IntLikeType

from dynaxla.custom_ops import internal
from dynaxla.decompositions.affine_grids import AFFINE_GRID_DECOMPOSITIONS
from dynaxla.decompositions.assertions import ASSERTION_DECOMPOSITIONS
from dynaxla.decompositions.eager_dtypes import EAGER_DTYPES
from dynaxla.decompositions.eager_strides import stride_decompositions
from dynaxla.decompositions.fused_attention import ATTENTION_DECOMPOSITIONS, CHECKED_ATTENTION
from dynaxla.decompositions.margin_losses import MARGIN_DECOMPOSITIONS
from dynaxla.decompositions.mask_writes import write_by_mask
from dynaxla.decompositions.optimizer_steps import SCALED_SUM_DECOMPOSITIONS, foreach_decompositions
from dynaxla.decompositions.rnn_cells import RNN_CELL_DECOMPOSITIONS
from dynaxla.decompositions.transformer_fast_paths import FAST_PATH_DECOMPOSITIONS
from dynaxla.decompositions.varying_sizes import decompositions_of_varying_sizes
from dynaxla.ops.table import core_table
from dynaxla.torch_api.decompositions import (
    MULTIPLY_ADD,
    Decomposition,
    core_decompositions,
    decompositions_of,
    get_computation_dtype,
)
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten
_INFERENCE = aten._native_batch_norm_legit_no_training.default

# torch decomposes these ops, outside of its core set, into ops of the op table.
_EXTRA_DECOMPOSED = (
    aten._euclidean_dist,
    aten._batch_norm_no_update,
    aten._batch_norm_with_update_functional,
    aten._to_copy,
    aten.batch_norm_backward,
    aten.native_batch_norm,
    aten.addmv,
    aten.addr,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.diag,
    aten.huber_loss,
    aten.linalg_vector_norm,
    aten.log_softmax,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.soft_margin_loss,
    aten.squeeze.dims,
    aten.std,
    aten.xlogy,
)


@cache
def decomposition_table() -> Mapping[OpOverload, Decomposition]:
    """Returns torch's decompositions, except of ops in the op table, and this package's own decompositions."""
    chosen = decompositions_but_strides()
    return {**chosen, **stride_decompositions(chosen)}


@cache
def decompositions_but_strides() -> dict[OpOverload, Decomposition]:
    """Returns the same, but for those that give results eager's strides where torch's fake kernels predict others."""
    taken = core_table().records.keys()
    available = {
        **decompositions_of(_EXTRA_DECOMPOSED),
        **core_decompositions(),
        **ASSERTION_DECOMPOSITIONS,
        **ATTENTION_DECOMPOSITIONS,
        **RNN_CELL_DECOMPOSITIONS,
        **FAST_PATH_DECOMPOSITIONS,
        **foreach_decompositions(),
        **AFFINE_GRID_DECOMPOSITIONS,
        **MARGIN_DECOMPOSITIONS,
        MULTIPLY_ADD: _multiply_add,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        aten.cholesky.default: _cholesky,
        aten._convolution.default: _convolution,
        aten._convolution.deprecated: _convolution,
        aten._index_put_impl.default: _index_put,
        aten._jagged_to_padded_dense_forward.default: _pad_rows,
        aten._padded_dense_to_jagged_forward.default: _unpad_rows,
        aten.mvlgamma.default: _mvlgamma,
        aten.isin.Tensor_Tensor: _isin,
        **dict.fromkeys((aten.channel_shuffle.default, aten.native_channel_shuffle.default), _channel_shuffle),
        aten._new_zeros_with_same_feature_meta.default: _new_tangent,
        aten.glu_jvp.default: _glu_tangent,
        aten.glu_backward_jvp.default: _glu_gradient_tangent,
        **{op: partial(_of_floats, op) for op in (aten.max_unpool2d.default, aten.max_unpool3d.default)},
    }
    left = {*taken, aten.bernoulli.default}  # torch's decomposition of it draws different numbers than eager
    rewrites = {op: rewrite for op, rewrite in available.items() if op not in left}
    own = {
        **decompositions_of_varying_sizes(),
        **EAGER_DTYPES,
        **SCALED_SUM_DECOMPOSITIONS,
        **CHECKED_ATTENTION,
        **GPU_DECOMPOSITIONS,
        aten._grouped_mm.default: _grouped_mm,
        aten.index_put.default: write_by_mask,
    }
    return {**rewrites, **own}  # type: ignore[dict-item]


def _multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Decomposes what Dynamo emits for `addcmul_`. Eager rounds the product before the sum, a fused op would not."""
    return x * y + z


def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Decomposes cholesky: only its check, which raises for some values, runs in eager."""
    factor, info = torch.linalg.cholesky_ex(x, upper=upper)
    aten._linalg_check_errors(info, "cholesky", is_matrix=x.dim() == 2)
    return factor  # type: ignore[no-any-return]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    """Drops the last arguments, which select eager's library."""
    return aten.convolution(x, weight, bias, *settings[:6])  # type: ignore[no-any-return]


def _index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """Drops `unsafe`, which disables eager's check of the indices."""
    return aten.index_put(x, indices, values, accumulate)  # type: ignore[no-any-return]


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Torch's decomposition gives `x` itself, not a copy, where one group or groups of one channel shuffle nothing."""
    count = x.shape[1]
    apart = x.reshape(x.shape[0], groups, count // groups, *x.shape[2:]).transpose(1, 2)
    return apart.clone(memory_format=torch.contiguous_format).reshape(x.shape)


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Products [g, m, n] of left [m, s] and right [s, n] over each group's part of s: the gradient of the groups' matrices.
    Other forms are left to the op."""
    if (left.dim(), right.dim()) != (2, 2) or offs is None or bias is not None or out_dtype not in (None, left.dtype):
        return NotImplemented
    return internal.GROUP_PRODUCTS(left.t(), right, offs)


def _mvlgamma(x: Tensor, p: int) -> Any:
    """torch's own for what eager takes: it does not look at the number of dims."""
    return NotImplemented if p < 1 else core_decompositions()[aten.mvlgamma.default](x, p)


def _isin(elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """torch's own, which searches sorted numbers, for numbers: NaN, behind which a search is lost, equals none."""
    search: Any = core_decompositions()[aten.isin.Tensor_Tensor]
    if assume_unique or not test_elements.is_floating_point():
        return search(elements, test_elements, assume_unique=assume_unique, invert=invert)
    found = search(elements, torch.where(test_elements.isnan(), torch.inf, test_elements))
    found = found & ((elements != torch.inf) | (test_elements == torch.inf).any())
    return ~found if invert else found


def _of_floats(op: OpOverload, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """torch's own for the dtypes that eager takes."""
    return core_decompositions()[op](x, *arguments, **options) if x.is_floating_point() else NotImplemented


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of v and g, where the weight is v * g / norms, and norms are those of v along all dims but
    `dim`, which is 0 or the last.

    As in eager, 16-bit floats are rounded once, at the end.
    """
    others = [d for d in range(v.dim()) if d != dim]
    dtype, wide = v.dtype, get_computation_dtype(v.dtype)
    grad, v, g, norms = grad.to(wide), v.to(wide), g.to(wide), norms.to(wide)
    along = (grad * v).sum(others, keepdim=True) / norms
    return (g / norms * (grad - v * along / norms)).to(dtype), along.to(dtype)


def _new_tangent(tangent: Tensor, primal: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Zeros for the tangent of a result that is written in parts: with the sizes and strides of the result, below vmap's dims.

    Args:
        tangent: has the dtype and, in front, the dims of vmap.
        primal: the result.
    """
    if self_num_batch_dims == 0:
        return torch.zeros_like(primal, dtype=tangent.dtype)
    return tangent.new_zeros([*tangent.shape[:self_num_batch_dims], *primal.shape])


def _glu_tangent(glu: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """The tangent of `glu = a * sigmoid(b)`, of which a and b are the halves of x along dim."""
    gate = x.chunk(2, dim)[1].sigmoid()
    da, db = dx.chunk(2, dim)
    return da * gate + db * (glu - gate * glu)


def _glu_gradient_tangent(grad_x: Tensor, grad: Tensor, x: Tensor, dgrad: Tensor, dx: Tensor, dim: int) -> Tensor:
    """The tangent of glu's gradient: of `grad * gate` and `grad * a * slope`, of which slope is that of the sigmoid."""
    del grad_x
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    gate = b.sigmoid()
    slope = gate * (1 - gate)
    of_a = dgrad * gate + grad * slope * db
    of_b = dgrad * a * slope + grad * (da * slope + a * slope * (1 - 2 * gate) * db)
    return torch.cat([of_a, of_b], dim)


def _log_sigmoid(x: Tensor) -> Any:
    """The second result is exp(-|x|) on the CPU and empty on a GPU."""
    if not x.is_cuda:
        return NotImplemented
    wide = x.to(get_computation_dtype(x.dtype))
    return (wide.clamp(max=0) - wide.abs().neg().exp().log1p()).to(x.dtype), x.new_zeros(0)


def _batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """For x [n, channels, ...]; the statistics are empty on the CPU and those of the channels on a GPU."""
    if not x.is_cuda:
        return EAGER_DTYPES[_INFERENCE](x, weight, bias, mean, var, momentum, eps)  # type: ignore[no-any-return]
    dtype = get_computation_dtype(x.dtype)
    mean, rstd = mean.to(dtype), (var.to(dtype) + eps).rsqrt()
    scale = rstd if weight is None else rstd * weight.to(dtype)
    shift = -mean * scale if bias is None else bias.to(dtype) - mean * scale
    channels = [1, -1, *[1] * (x.dim() - 2)]
    return (x.to(dtype) * scale.view(channels) + shift.view(channels)).to(x.dtype), mean, rstd


def _addmm_activation(
    x: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    use_gelu: bool = False,
) -> Any:
    """cuBLAS approximates GELU by a hyperbolic tangent, the CPU's kernel does not."""
    if not (use_gelu and x.is_cuda):
        return NotImplemented
    return torch.nn.functional.gelu(torch.addmm(x, mat1, mat2, beta=beta, alpha=alpha), approximate="tanh")


GPU_DECOMPOSITIONS: Mapping[OpOverload, Decomposition] = MappingProxyType(
    {
        aten.log_sigmoid_forward.default: _log_sigmoid,
        _INFERENCE: _batch_norm_inference,
        aten._addmm_activation.default: _addmm_activation,
    }
)
"""Ops whose kernels for CUDA tensors give other results than the CPU's, which the bodies give: such as gradients alone read."""


def _pad_rows(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[IntLikeType], padding_value: float = 0.0
) -> Any:
    """Pads jagged rows, `[elements, ...] -> [rows, longest, ...]`. One that is longer is cut, as in eager."""
    if len(offsets) != 1 or len(max_lengths) != 1:
        return NotImplemented  # which eager's kernels refuse
    bounds, longest = offsets[0], max_lengths[0]
    if values.shape[0] == 0:
        return values.new_full((bounds.shape[0] - 1, longest, *values.shape[1:]), padding_value)
    padding = values.new_full([], padding_value)
    places = bounds[:-1].unsqueeze(1) + torch.arange(longest, device=bounds.device)  # type: ignore[arg-type]
    is_given = places < bounds[1:].unsqueeze(1)
    rows = aten._unsafe_index.Tensor(values, [torch.where(is_given, places, 0)])
    return torch.where(is_given.reshape(*is_given.shape, *[1] * (values.ndim - 1)), rows, padding)


def _unpad_rows(dense: Tensor, offsets: Sequence[Tensor], total_L: IntLikeType | None = None) -> Any:
    """Takes it back, `[rows, longest, ...] -> [elements, ...]`. Their number, if it is not given, is in the data."""
    if len(offsets) != 1 or total_L is None:
        return NotImplemented
    bounds = offsets[0]
    if isinstance(total_L, int) and total_L == 0:
        return dense.new_empty(0, *dense.shape[2:])
    places = torch.arange(total_L, device=bounds.device)  # type: ignore[arg-type]
    rows = torch.searchsorted(bounds, places, right=True) - 1
    return aten._unsafe_index.Tensor(dense, [rows, places - aten._unsafe_index.Tensor(bounds, [rows])])
